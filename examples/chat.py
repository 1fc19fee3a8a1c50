"""Several chats at once through block tables: what `blocktable run` does, in a few lines.

python examples/chat.py [folder of a Hugging Face model]
"""

import sys

from blocktable.engine import Engine
from blocktable.engine.smollm2 import smollm2

SYSTEM = (
    "You are a terse assistant who answers in one short sentence, never more than twenty words, "
    "and who never makes anything up, whatever the question may be."
)
QUESTIONS = ["What is the capital of France?", "Why is the sky blue?", "Name a fruit that is red."]

if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else smollm2()
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS]
    # Tables that FlashInfer's MLA kernel would take; the chats share the blocks of the system prompt.
    with Engine(folder, backend="FLASHINFER_MLA", block_size=32, max_model_len=8192) as engine:
        for question, answers in zip(QUESTIONS, engine.generate(chats, max_tokens=48), strict=True):
            print(f"> {question}\n{answers[0].text}\n")
        stats = engine.cache.stats()
        print(f"{stats['hit_tokens']} of {stats['query_tokens']} prompt tokens were cached")
        print(f"{stats['cells_written']} table entries changed in {engine.scheduler.steps} steps")
