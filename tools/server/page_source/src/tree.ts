/* A conversation as a tree of messages: the branch that ends at a message, and the alternatives to a message. */

import type { Message } from "./types";

export type Messages = Map<string, Message>;

/** The messages from the beginning of the conversation to `leaf`. */
export function branch(messages: Messages, leaf: string | null): Message[] {
  const path: Message[] = [];
  const seen = new Set<string>(); // a file that was imported may hold a circle
  for (let id = leaf; id !== null && !seen.has(id); ) {
    const message = messages.get(id);
    if (!message) break;
    seen.add(id);
    path.push(message);
    id = message.parent;
  }
  return path.reverse();
}

/** `message` and the others with the same parent, oldest first. */
export function siblings(messages: Messages, message: Message): Message[] {
  return children(messages, message.parent);
}

/** The last message of the newest branch below `message`. */
export function newestLeaf(messages: Messages, message: Message): Message {
  const seen = new Set<string>([message.id]);
  for (let last = message; ; ) {
    const next = children(messages, last.id).at(-1);
    if (!next || seen.has(next.id)) return last;
    seen.add(next.id);
    last = next;
  }
}

/** The message that the conversation ends with when `message` is removed: of another version, or the one before. */
export function leafWithout(messages: Messages, message: Message): string | null {
  const other = siblings(messages, message).findLast(({ id }) => id !== message.id);
  return other ? newestLeaf(messages, other).id : message.parent;
}

/** `message` and all that follow it, on any branch. */
export function descendants(messages: Messages, message: Message): Message[] {
  const found = new Set([message]);
  for (const one of found) for (const child of children(messages, one.id)) found.add(child);
  return [...found];
}

function children(messages: Messages, parent: string | null): Message[] {
  return [...messages.values()]
    .filter((other) => other.parent === parent)
    .sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}
