"""transformers ``generate`` as a peer: plain, with prompt lookup, or with an assistant model."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood.bench.peers.workers.protocol import Generate, Message, choose_dtype, peak_bytes, reset_peak, serve
else:  # runs as a script in another Python, without the draftwood package
    from protocol import Generate, Message, choose_dtype, peak_bytes, reset_peak, serve


class PassCounter:
    """Counts passes and emitted tokens of ``generate``, as a forward hook and a streamer."""

    def __init__(self) -> None:
        self.positions: list[int] = []  # per pass
        self.emitted: list[int] = []  # tokens per pass
        self.first = 0.0  # time of the first tokens
        self._is_prompt = True

    def hook(self, module: object, args: tuple[Any, ...], kwargs: Message) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.positions.append(ids.shape[-1])

    def put(self, tokens: Any) -> None:
        if self._is_prompt:  # generate streams the prompt first
            self._is_prompt = False
            return
        self.first = self.first or time.perf_counter()
        self.emitted.append(tokens.numel())

    def end(self) -> None:
        pass

    def counts(self, num_prompt: int) -> Message:
        """Count cycles, drafted and accepted tokens; by depth too if every pass emitted tokens."""
        if len(self.positions) != len(self.emitted):
            return {"cycles": len(self.positions)}
        first, *others = self.positions
        drafted = [first - num_prompt, *(count - 1 for count in others)]
        accepted = [count - 1 for count in self.emitted]
        depths = range(1, max(drafted) + 1)
        return {
            "cycles": len(self.positions),
            "drafted": sum(drafted),
            "accepted": sum(accepted),
            "tried_by_depth": [sum(count >= depth for count in drafted) for depth in depths],
            "accepted_by_depth": [sum(count >= depth for count in accepted) for depth in depths],
        }


def load(model: Message) -> tuple[Generate, Message]:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(model["threads"])
    device, dtype = model["device"], choose_dtype(model)
    target = _load_model(transformers, model["folder"], getattr(torch, dtype), device)
    ends = end_ids(Path(model["folder"]))
    mode = _speculation(transformers, model, getattr(torch, dtype))
    on_gpu = device.startswith("cuda")

    def generate(request: Message) -> Message:
        prompt = torch.tensor([request["prompt_ids"]], device=device)
        own_ends = [] if request["ignore_eos"] else ends
        counter = PassCounter()
        handle = target.register_forward_pre_hook(counter.hook, with_kwargs=True)
        torch.manual_seed(request["seed"])
        torch.cuda.reset_peak_memory_stats() if on_gpu else reset_peak()
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                output = target.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=request["max_tokens"],
                    eos_token_id=own_ends or None,
                    pad_token_id=ends[0] if ends else 0,
                    streamer=counter,
                    **_sampling_arguments(request),
                    **mode,
                )
            token_ids = output[0, prompt.shape[1] :].tolist()
            finished = time.perf_counter()
        finally:
            handle.remove()
        return {
            "token_ids": token_ids,
            "first_token_seconds": counter.first - started,
            "first_tokens": counter.emitted[0],
            "total_seconds": finished - started,
            "finish_reason": "stop" if token_ids[-1] in own_ends else "length",
            "counts": counter.counts(prompt.shape[1]),
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else peak_bytes(),
        }

    return generate, {"version": transformers.__version__, "dtype": dtype}


def end_ids(folder: Path) -> list[int]:
    """Read all end-of-sequence ids of the model folder."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        found += [index for index in (value if isinstance(value, list) else [value]) if isinstance(index, int)]
    return list(dict.fromkeys(found))


def _load_model(transformers: Any, folder: str, dtype: Any, device: str) -> Any:
    """Load the model without its recommended sampling settings: only those of the request apply."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    model = loaded.to(device).eval()
    model.generation_config = transformers.GenerationConfig()
    return model


def _speculation(transformers: Any, model: Message, dtype: Any) -> Message:
    """Return the arguments that make ``generate`` speculate."""
    if model["variant"] == "lookup":
        options = model["options"]
        return {"prompt_lookup_num_tokens": options["tokens"], "max_matching_ngram_size": options["ngram"]}
    if model["variant"] == "assisted":
        return {"assistant_model": _load_model(transformers, model["assistant"], dtype, model["device"])}
    return {}


def _sampling_arguments(request: Message) -> Message:
    if request["temperature"] == 0.0:
        return {"do_sample": False}
    chosen = {name: request[name] for name in ("temperature", "top_p", "top_k")}
    return {"do_sample": True, **chosen, **({"min_p": request["min_p"]} if request["min_p"] else {})}


if __name__ == "__main__":
    serve(load)
