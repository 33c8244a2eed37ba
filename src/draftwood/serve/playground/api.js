// The server's API: one request at a time, with its stream of cycles.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function send(path, key, options = {}) {
  const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Check that it still runs, then try again.");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not one of the server's own errors */ }
  throw new ApiError(message, response.status);
}

export async function getModel(key) {
  const response = await send("v1/models", key);
  return (await response.json()).data[0];
}

// Yields the chunks of a chat; the last one has the usage.
export async function* streamChat(fields, key, signal) {
  const body = JSON.stringify({
    ...fields, stream: true, stream_options: { include_usage: true, include_cycles: true },
  });
  const response = await send("v1/chat/completions", key, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError("The connection ended before the answer did.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  }
}
