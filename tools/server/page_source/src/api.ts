/* Requests to the server: the list of models, and streamed answers. No other module uses the network. */

import { apiKey } from "./settings";
import { eventData } from "./sse";

/** A model of the server; `context`: tokens that fit, `sees`: it takes images, both known while it is loaded. */
export interface Model {
  id: string;
  loaded: boolean;
  context: number | null;
  sees: boolean | null;
}

export type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

export interface ChatMessage {
  role: "system" | "user" | "assistant";
  content: string | Part[];
  /** Of an answer that is continued. */
  reasoning_content?: string;
}

/** A piece of an answer; `usage` and `timings` come with the last one. */
export interface Piece {
  text: string;
  thinking: string;
  finish: string | null;
  usage: Usage | null;
  timings: Timings | null;
}

export interface Usage {
  prompt_tokens?: number;
  completion_tokens?: number;
  prompt_tokens_details?: { cached_tokens?: number } | null;
}

/** Tokens (`_n`) and milliseconds (`_ms`) of the prompt and of the answer; cache_n: tokens that were not computed again. */
export interface Timings {
  prompt_n?: number;
  prompt_ms?: number;
  predicted_n?: number;
  predicted_ms?: number;
  predicted_per_second?: number;
  cache_n?: number;
}

/** A request that failed. `status`: HTTP's, 0 where the server was not reached or the connection ended early. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    /** Milliseconds until a model that is being loaded is asked for again; null: it is another error. */
    readonly loading: number | null = null,
  ) {
    super(message);
  }
}

export const KEY_WANTED = "This server needs an API key.";
const UNREACHABLE = "Server not reachable.";
const TOO_LONG = "This conversation is too long for the model: start a new one, or delete or shorten messages, files and images.";
const LOADING = "Loading model…";
const RETRY_S = 2;
const BROKEN = "The connection to the server was lost.";

/** The models that the server has. */
export async function models(): Promise<Model[]> {
  const response = await send("v1/models", {});
  const { data } = (await response.json()) as { data?: ModelBody[] };
  return (data ?? []).map(({ id, status, meta, architecture }) => ({
    id,
    loaded: status?.value !== "unloaded",
    context: meta?.n_ctx ?? null,
    sees: architecture?.input_modalities?.includes("image") ?? null,
  }));
}

/** How many tokens a text has. The server loads the model if it is not. */
export async function tokenize(content: string, model: string | null): Promise<number> {
  const response = await post("tokenize", { ...(model ? { model } : {}), content, parse_special: false });
  return ((await response.json()) as { tokens: number[] }).tokens.length;
}

/** Streams the answer to `messages`. Throws an ApiError; an aborted `signal` ends it with an AbortError. */
export async function* chat(
  messages: ChatMessage[],
  model: string | null,
  options: { [name: string]: number | string },
  signal: AbortSignal,
): AsyncGenerator<Piece> {
  const body = { ...(model ? { model } : {}), messages, ...options, stream: true, stream_options: { include_usage: true } };
  const response = await post("v1/chat/completions", body, signal);
  if (!response.body) throw new ApiError(0, BROKEN);
  let ended = false;
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const piece = readPiece(data);
      ended ||= piece.finish !== null;
      yield piece;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError(0, BROKEN);
  }
  if (!ended) throw new ApiError(0, BROKEN);
}

function post(path: string, body: object, signal?: AbortSignal): Promise<Response> {
  return send(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), ...(signal ? { signal } : {}) });
}

async function send(path: string, init: RequestInit): Promise<Response> {
  const headers = new Headers(init.headers);
  const key = apiKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response: Response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...init, headers, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError(0, UNREACHABLE);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** What a request that the server refused means to people. */
async function refusal(response: Response): Promise<ApiError> {
  const text = await response.text().catch(() => "");
  let error: { message?: unknown; code?: unknown } | undefined;
  try {
    ({ error } = JSON.parse(text) as { error?: typeof error });
  } catch {
    // not JSON: a proxy's page, or nothing
  }
  const { status } = response;
  if (status === 503 && error?.code === "loading_model") {
    return new ApiError(status, LOADING, 1000 * (Number(response.headers.get("Retry-After")) || RETRY_S));
  }
  return new ApiError(status, sentence(response, error?.code, error?.message));
}

function sentence(response: Response, code: unknown, message: unknown): string {
  if (response.status === 401) return KEY_WANTED;
  if (response.status === 413 || code === "context_length_exceeded") return TOO_LONG;
  if (typeof message === "string") return message;
  return `The server answered ${response.status}${response.statusText ? ` (${response.statusText})` : ""}.`;
}

interface ModelBody {
  id: string;
  status?: { value?: string };
  meta?: { n_ctx?: number };
  architecture?: { input_modalities?: string[] };
}

interface Chunk {
  choices?: { delta?: { content?: string | null; reasoning_content?: string | null }; finish_reason?: string | null }[];
  usage?: Usage | null;
  timings?: Timings | null;
  error?: { message?: string; code?: number | string | null };
}

function readPiece(data: string): Piece {
  const { choices, usage, timings, error } = JSON.parse(data) as Chunk;
  if (error) throw new ApiError(500, error.code === "context_length_exceeded" ? TOO_LONG : error.message ?? "The server could not finish the answer.");
  const choice = choices?.[0];
  return {
    text: choice?.delta?.content ?? "",
    thinking: choice?.delta?.reasoning_content ?? "",
    finish: choice?.finish_reason ?? null,
    usage: usage ?? null,
    timings: timings ?? null,
  };
}
