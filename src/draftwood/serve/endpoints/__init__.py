"""The endpoints, one class each. A new one needs a file here and a row in the routes of ``app.py``."""

from draftwood.serve.endpoints.chat import ChatCompletions
from draftwood.serve.endpoints.completions import Completions
from draftwood.serve.endpoints.health import Health
from draftwood.serve.endpoints.messages import CountTokens, Messages
from draftwood.serve.endpoints.metrics import MetricsReport
from draftwood.serve.endpoints.models import Models
from draftwood.serve.endpoints.openapi import OpenApi
from draftwood.serve.endpoints.playground import Playground
from draftwood.serve.endpoints.responses import Responses
from draftwood.serve.endpoints.tokens import Detokenize, Tokenize
