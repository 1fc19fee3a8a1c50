"""`KVCache` under a model loop of your own: admit, extend, commit, slots, table. The model here is a toy.

Its "attention" adds up what the row's cells hold, so a wrong block or slot changes every token that follows.
"""

import numpy as np

import blocktable
from blocktable.device import DeviceTables

cache = blocktable.KVCache([blocktable.plan(max_model_len=64, block_size=4)], num_blocks=32, max_rows=4)
device = DeviceTables(cache.tables, "cpu")
memory = np.zeros(32 * 4, np.int64)  # one number per slot stands for keys and values


def forward(rows: list[int], tokens: np.ndarray, slots: np.ndarray) -> list[int]:
    """Write the step's tokens, read every row through its table, and return the next token of each."""
    delta = cache.commit()
    device.apply(delta)
    for _, source, target in delta.copies:  # blocks that a fork shares and one row goes on to write
        memory[target * 4 :][:4] = memory[source * 4 :][:4]
    memory[slots[0]] = tokens
    lengths = cache.lengths[rows]
    tables = device.gather(rows, len(rows), lengths).tables[0].numpy()
    cells = [(tables[i, : -(-n // 4), None] * 4 + np.arange(4)).reshape(-1)[:n] for i, n in enumerate(lengths)]
    return [int(memory[cell].sum()) % 97 for cell in cells]


prompts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 1], [3]]
rows, starts = [0, 1, 2], np.cumsum([0, *map(len, prompts)])
cached, slots = cache.admit(rows, starts, np.concatenate(prompts))  # row 1 finds [5, 6, 7, 8] computed by row 0
fresh = np.concatenate([prompt[begin:] for prompt, begin in zip(prompts, cached, strict=True)])
drawn = forward(rows, fresh, slots)
for _ in range(8):
    print(drawn)
    slots = cache.extend(rows, [0, 1, 2, 3], drawn)
    drawn = forward(rows, np.array(drawn), slots)
cache.free(rows)
print(f"{cached.tolist()} prompt tokens were cached; {cache.stats()['cached']} blocks still answer prompts")
