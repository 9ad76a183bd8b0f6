/* The shapes of what the page keeps and shows: conversations, their messages, figures of an answer. */

/** A text file of a message. */
export interface TextFile {
  name: string;
  text: string;
}

/** An image of a message. url: a data URL of a PNG, JPEG, WebP or GIF file; width, height: in pixels. */
export interface ImageFile {
  name: string;
  url: string;
  width: number;
  height: number;
}

export type Attachment = TextFile | ImageFile;

/** The images of a message. */
export function imagesOf(files: Attachment[] | undefined): ImageFile[] {
  return (files ?? []).filter((file) => "url" in file);
}

/** A message is one node of its conversation's tree: editing and regenerating add siblings, so nothing is lost. */
export interface Message {
  id: string;
  conversation: string;
  parent: string | null;
  role: "user" | "assistant";
  text: string;
  /** Attached; older messages have none. */
  files?: Attachment[];
  /** What the model thought before it answered. */
  thinking: string;
  /** Milliseconds since 1970. */
  created: number;
  model: string | null;
  /** partial: being written, or the page was closed meanwhile. */
  state: "done" | "partial" | "stopped" | "failed";
  /** The server's reason for the end: "stop", "length", ... */
  finish: string | null;
  error: string | null;
  figures: Figures | null;
}

/** What an answer took. Times in milliseconds. */
export interface Figures {
  promptTokens: number | null;
  cachedTokens: number | null;
  tokens: number | null;
  /** Tokens per second while the answer was generated. */
  rate: number | null;
  firstToken: number | null;
  thinking: number | null;
}

export interface Conversation {
  id: string;
  title: string;
  /** The user chose the title. */
  named: boolean;
  created: number;
  updated: number;
  /** The last message of the branch that is shown. */
  leaf: string | null;
  /** The system prompt. */
  system: string;
  model: string | null;
}

/** A conversation with all its messages, as it is exported. */
export interface Record {
  conversation: Conversation;
  messages: Message[];
}

/** A random identifier. `crypto.randomUUID` exists in secure contexts only, and the page may be served by plain HTTP. */
export function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
