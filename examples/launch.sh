#!/bin/sh
# A launch that a release refuses, a way out fed back, an hour of traffic on the tables that result, and a few answers
# of a real model through them.
#
#     examples/launch.sh [path of the blocktable command]
set -eu
blocktable=${1:-blocktable}
here=$(dirname "$0")

# Print a command, run it, and hold it to the exit code that this page promises.
expect() {
    code=$1
    shift
    printf '\n$ blocktable %s\n' "$*"
    got=0
    "$blocktable" "$@" || got=$?
    if [ "$got" -ne "$code" ]; then
        printf 'expected exit code %s, got %s\n' "$code" "$got" >&2
        exit 1
    fi
}

launch='--backend FLASHINFER_MLA --max-model-len 9416'

# shellcheck disable=SC2086 # the words of a launch are words
{
    echo "A server of 9416 tokens in blocks of 32 would stop minutes after its start, with the weights loaded:"
    expect 1 check --engine vllm==0.19.1 $launch --block-size 32

    echo
    echo "One of the ways out, fed back:"
    way=$("$blocktable" check --engine vllm==0.19.1 $launch --block-size 32 | sed -n 's/.*\(--block-size [0-9]*\).*/\1/p')
    expect 0 check --engine vllm==0.19.1 $launch $way

    echo
    echo "A newer release pads the row, and the same launch starts; its own command line is understood too:"
    expect 0 check --engine vllm==0.32.0 -- vllm serve deepseek-ai/DeepSeek-V3 --max-model-len 9416 --block-size 32 \
        --attention-backend FLASHINFER_MLA

    echo
    echo "An hour of synthetic traffic through such tables; the kernel is asked at every step:"
    expect 0 simulate $launch --block-size 32

    echo
    echo "Its first minutes again, with every law verified at every step:"
    expect 0 simulate $launch --block-size 32 --limit 400 --check

    echo
    echo "A real model behind rows as wide as that server's; it stops where the server stops:"
    expect 1 run --engine-width vllm==0.19.1 $launch --block-size 32 --prompts "$here/prompts.jsonl"

    echo
    echo "And behind rows as wide as the kernel needs, with one system prompt that all answers share:"
    expect 0 run $launch --block-size 32 --prompts "$here/prompts.jsonl" \
        --system "You are a terse assistant who answers in one short sentence, never more than twenty words, and who never makes anything up, whatever the question may be."
}
