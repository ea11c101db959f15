"""Generate text from Python with tensor parallelism.

python examples/decode.py MODEL --ranks 2
"""

from __future__ import annotations

import argparse

from distmk import LLM, SamplingParams, run_main


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a Hugging Face folder or a GGUF file")
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--backend", choices=("auto", "host", "cuda", "emulated"), default="auto")
    arguments = parser.parse_args()
    prompts = ["The capital of France is", "Water boils at", "Once upon a time"]
    with LLM(arguments.model, tensor_parallel_size=arguments.ranks, backend=arguments.backend) as llm:
        for token in llm.stream(prompts[0], SamplingParams(max_tokens=8)):
            print(token.text, end="", flush=True)
        print()
        for output in llm.generate(prompts, SamplingParams(max_tokens=16)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        if llm.rank == 0:
            print(f"on {llm.backend}, {llm.tensor_parallel_size} ranks of {llm.num_workers} workers")
    return 0


if __name__ == "__main__":
    run_main(main)
