"""Our drafters inside vLLM: a proposer that its option `--speculative-config` names."""

from draftwood.vllm.options import VllmOptions, read_options
from draftwood.vllm.proposer import Proposer
