/* Makes conversations and messages. */

import { type Attachment, type Conversation, type Message, newId } from "./types";

const TITLE_LENGTH = 60;

export function newConversation(title: string, system: string, model: string | null): Conversation {
  const now = Date.now();
  return { id: newId(), title: titleOf(title), named: false, created: now, updated: now, leaf: null, system, model };
}

export function newQuestion(conversation: Conversation, parent: string | null, text: string, files: Attachment[]): Message {
  return { ...newMessage(conversation, parent), role: "user", text, files, state: "done" };
}

/** An answer that begins with `text`. */
export function newAnswer(conversation: Conversation, parent: string | null, model: string | null, text = ""): Message {
  return { ...newMessage(conversation, parent), text, model };
}

function newMessage(conversation: Conversation, parent: string | null): Message {
  return {
    id: newId(),
    conversation: conversation.id,
    parent,
    role: "assistant",
    text: "",
    thinking: "",
    created: Date.now(),
    model: null,
    state: "partial",
    finish: null,
    error: null,
    figures: null,
  };
}

/** The first line, shortened after a word. */
function titleOf(text: string): string {
  const line = text.trim().split("\n")[0] ?? "";
  if (line.length <= TITLE_LENGTH) return line;
  const cut = line.slice(0, TITLE_LENGTH);
  return `${/\s/.test(cut) ? cut.replace(/[\s,;:]+\S*$/, "") : cut}…`;
}
