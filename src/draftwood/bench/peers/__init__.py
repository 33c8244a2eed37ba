"""Other engines on the same prompts in the same run: each an optional adapter with a process and a Python of its own.

A peer is named as ``transformers``, ``llamacpp:lookup`` or, with options, ``transformers:assisted,model=NAME``.
"""

from draftwood.bench.peers.environments import absent
from draftwood.bench.peers.files import gguf_of
from draftwood.bench.peers.install import install_peer
from draftwood.bench.peers.messages import PeerAnswer, PeerModel
from draftwood.bench.peers.process import Peer
from draftwood.bench.peers.specs import ENGINES, PEERS, PeerSpec, find_peer, peer_names

__all__ = [
    "ENGINES",
    "PEERS",
    "Peer",
    "PeerAnswer",
    "PeerModel",
    "PeerSpec",
    "absent",
    "find_peer",
    "gguf_of",
    "install_peer",
    "peer_names",
]
