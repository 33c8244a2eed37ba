"""A server that OpenAI's clients talk to: one model, one drafter, requests of many people in one batch."""

from draftwood.serve.app import ServerOptions
from draftwood.serve.server import address, check_installed, listen, run

__all__ = ["ServerOptions", "address", "check_installed", "listen", "run"]
