# /// script
# requires-python = "==3.11.*"
# dependencies = ["torch==2.13.0", "kvpress==0.5.5", "gguf"]
# ///
"""The needles of `needle.py` through kvpress's presses, in an environment of its own.

python benchmarks/needle_kvpress.py prompts.json kvpress.jsonl GGUF_FILE [--budgets 512 256 128]
"""

import argparse
import json
import pathlib

import kvpress
import torch
import transformers

NEW_TOKENS, STOP = 28, 2


def presses(kept: float) -> dict[str, object]:
    """Presses that keep this share of the prompt, by the name of kvjax's policy."""
    ratio = 1 - kept
    return {
        "StreamingLLM": kvpress.StreamingLLMPress(ratio),
        "SnapKV, kvpress settings": kvpress.SnapKVPress(ratio),
        "PyramidKV, kvpress window": kvpress.PyramidKVPress(ratio),
        "AdaKV, kvpress settings": kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
        "TOVA, kvpress settings": kvpress.TOVAPress(ratio),
        "Knorm, kvpress settings": kvpress.KnormPress(ratio),
        "ExpectedAttention": kvpress.ExpectedAttentionPress(ratio),
    }


def answer(model, ids: list[int], press) -> list[int]:
    """Greedy tokens behind a compressed prompt, at their true positions."""
    cache = transformers.DynamicCache()
    prompt = torch.tensor([ids])
    with torch.no_grad():
        if press is None:
            logits = model(prompt, past_key_values=cache).logits[0, -1]
        else:
            with press(model):
                logits = model(prompt, past_key_values=cache).logits[0, -1]
        tokens = []
        for step in range(NEW_TOKENS):
            tokens.append(int(logits.argmax()))
            if tokens[-1] == STOP:
                break
            position = torch.tensor([[len(ids) + step]])
            logits = model(torch.tensor([[tokens[-1]]]), past_key_values=cache, position_ids=position).logits[0, -1]
    return tokens


def main() -> None:
    """Appends results as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("--budgets", type=int, nargs="*", default=[512, 256, 128])
    args = parser.parse_args()
    source = {"pretrained_model_name_or_path": str(args.gguf.parent), "gguf_file": args.gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    tasks = json.loads(args.prompts.read_text())
    for budget in args.budgets:
        for length, (rows, answers) in tasks.items():
            for name in presses(0.5):
                hits, texts = [], []
                for ids, wanted in zip(rows, answers, strict=True):
                    try:
                        press = presses(budget / len(ids))[name]
                        texts.append(tokenizer.decode(answer(model, ids, press)))
                    except Exception as error:
                        texts.append(f"{type(error).__name__}: {error}")
                    hits.append(wanted in texts[-1])
                line = {"policy": name, "budget": budget, "length": int(length), "hits": hits, "texts": texts}
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(name, budget, length, sum(hits), flush=True)


if __name__ == "__main__":
    main()
