"""How true the integer kernels are to quantised weights: perplexity and KL divergence from the same weights in float32.

    python benchmarks/stored_quality.py model.gguf --texts PROMPTS.jsonl
    python benchmarks/stored_quality.py model.gguf --quantize q5_k --texts PROMPTS.jsonl

``--quantize`` expands the weights and quantises them again; embeddings and head to Q8_0, and so matrices whose rows
blocks of 256 do not fill.
The reference computes in float32 with the dequantised weights and a float32 cache; ``--cache float32`` gives the
kernels such a cache too, which leaves the rounding of activations alone. The first tokens of a text are not counted:
there some models are chaotic, so that bfloat16 differs from float32 too.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from block_encoders import ENCODERS, encode
from draftwood.models.config import ModelConfig, parse_config
from draftwood.models.find import read_json_config, resolve, stored_file
from draftwood.models.gguf.dequantize import FORMATS, dequantize
from draftwood.models.gguf.reader import GgufFile
from draftwood.models.gguf.stored import StoredTensor, stored_tensors
from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.native.stored import assemble_stored, quantized_tensors
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import assemble, open_weights
from draftwood.text.tokenizer import Tokenizer

KINDS = {layout.name: kind for kind, layout in FORMATS.items()}
QUANTIZE_FORMATS = ("q8_0", "q4_0", "q4_k")  # of the command line
CHUNK = 64
SKIPPED = 16  # first positions of a text, which are not counted


def main() -> None:
    options = parse_arguments()
    folder = resolve(str(options.model)).path
    config = parse_config(*read_json_config(folder))
    tokenizer = Tokenizer.from_folder(folder)
    texts = [json.loads(line)["turns"][0] for line in options.texts.read_text(encoding="utf-8").splitlines()]
    ids = [tokenizer.encode(text)[: options.tokens] for text in texts[: options.limit]]
    with ExitStack() as stack:
        path = stored_file(folder)
        get: Callable[[str], torch.Tensor]
        if path is None:
            assert options.quantize, "not a GGUF file: give --quantize"
            get = stack.enter_context(open_weights(folder, config))
        else:
            tensors = stored_tensors(stack.enter_context(GgufFile(path)), config)
            get = partial(lambda tensors, name: values_of(tensors[name]), tensors)
        if options.quantize in QUANTIZE_FORMATS:
            tensors = quantized_tensors(config, get, options.quantize)
        elif options.quantize:
            tensors = encoded_tensors(config, get, options.quantize.upper())
        names = sorted({tensor.format for tensor in tensors.values() if len(tensor.shape) == 2})
        cache = getattr(torch, options.cache)
        ours = NativeTarget("ours", config, assemble_stored(config, tensors, cache), 4096, read_parts=lambda: None)  # type: ignore[arg-type, return-value]
        exact = NativeTarget("exact", config, assemble(config, lambda name: values_of(tensors[name])), 4096)
    ours_nll, exact_nll, divergence, agreed, count = 0.0, 0.0, 0.0, 0, 0
    for tokens in ids:
        found, wanted = (log_probabilities(target, tokens)[SKIPPED:] for target in (ours, exact))
        following = torch.tensor(tokens[SKIPPED + 1 :])[:, None]
        ours_nll -= float(found[:-1].gather(1, following).sum())
        exact_nll -= float(wanted[:-1].gather(1, following).sum())
        divergence += float((wanted.exp() * (wanted - found)).sum())
        agreed += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        count += len(found)
    num_losses = count - len(ids)
    ours_ppl, exact_ppl = (2.718281828459045 ** (total / num_losses) for total in (ours_nll, exact_nll))
    print(f"{', '.join(names)}; cache {options.cache}; {count} tokens of {len(ids)} texts")
    print(f"perplexity {ours_ppl:.4f}, float32 {exact_ppl:.4f}: {100 * (ours_ppl / exact_ppl - 1):+.2f}%")
    print(f"mean KL {divergence / count:.5f}, same first choice {100 * agreed / count:.2f}%")


def encoded_tensors(config: ModelConfig, get: Callable[[str], torch.Tensor], kind: str) -> dict[str, StoredTensor]:
    """The tensors with the plain encoders; Q8_0 where they do not fit."""
    tensors = quantized_tensors(config, get, "q8_0")
    for name, tensor in tensors.items():
        is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
        if len(tensor.shape) == 2 and not is_table and tensor.shape[1] % ENCODERS[kind][1] == 0:
            read = partial(lambda name: encode(get(name).float().numpy(), kind), name)
            tensors[name] = tensor._replace(format=kind, read=read)
    return tensors


def values_of(tensor: StoredTensor) -> torch.Tensor:
    if len(tensor.shape) == 1:
        return torch.from_numpy(tensor.floats())
    raw = tensor.read()
    return torch.from_numpy(dequantize(KINDS[tensor.format], raw.reshape(-1), "w")).view(tensor.shape)


def log_probabilities(target: NativeTarget, ids: list[int]) -> torch.Tensor:
    sequence = target.open(len(ids))
    rows = []
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        output = target.forward([Segment(sequence, part, chain_parents(len(part)), len(part))])
        rows.append(output.logits.log_softmax(-1))
        target.keep(sequence, range(len(part)))
    target.close(sequence)
    return torch.cat(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines with turns")
    parser.add_argument("--quantize", choices=(*QUANTIZE_FORMATS, *map(str.lower, ENCODERS)))
    parser.add_argument("--cache", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--limit", type=int, default=8, help="texts")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    return parser.parse_args()


if __name__ == "__main__":
    main()
