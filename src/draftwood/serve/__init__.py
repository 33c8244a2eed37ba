"""An HTTP server with OpenAI's API: one model, one default drafter, concurrent requests in one batch.

Its packages come with the extra ``serve``. Import it only where it is used.
"""

from draftwood.serve.server import create_server, listen, server_url
from draftwood.serve.state import ServerOptions
