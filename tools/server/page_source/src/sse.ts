/* The data of server-sent events, read from a response's body while it arrives. */

/** Yields the data of each event. Comments and other fields are left out, as the server's API uses neither. */
export async function* eventData(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  let lines: string[] = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      pending += done ? decoder.decode() : decoder.decode(value, { stream: true });
      let start = 0;
      for (let end = pending.indexOf("\n"); end >= 0; end = pending.indexOf("\n", start)) {
        const line = pending.slice(start, end).replace(/\r$/, "");
        start = end + 1;
        if (line.startsWith("data:")) lines.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && lines.length > 0) {
          yield lines.join("\n");
          lines = [];
        }
      }
      pending = pending.slice(start);
      if (done) return;
    }
  } finally {
    // Ends the request where the caller stopped early; after a failure there is nothing left to cancel.
    reader.cancel().catch(() => undefined);
  }
}
