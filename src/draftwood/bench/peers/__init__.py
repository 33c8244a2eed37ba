"""Other engines on the same prompts in the same run, each in its own process and Python.

A peer is named as ``transformers``, ``llamacpp:lookup`` or, with options, ``transformers:assisted,model=NAME``.
"""

from draftwood.bench.peers.environments import explain_absence
from draftwood.bench.peers.gguf import find_gguf
from draftwood.bench.peers.install import install_peer
from draftwood.bench.peers.messages import PeerModel, PeerResult
from draftwood.bench.peers.process import Peer
from draftwood.bench.peers.specs import ENGINES, PEERS, PeerSpec, find_peer, list_peers
