/* Keeps conversations in the browser (IndexedDB) and tells all tabs what changed.
 *
 * Messages are records of their own and every change of a conversation reads it in the same transaction, so tabs cannot
 * overwrite what others wrote: a message that two tabs add to the same place makes two branches. */

import { withFiles } from "./files";
import type { Conversation, Message, Record } from "./types";

const NAME = "mlc-amd";
const VERSION = 1;

/** What changed: the conversation, and the message if it is only that one's text; `removed`: it is gone. */
export interface Change {
  conversation: string;
  message?: string;
  removed?: boolean;
}

export class Store {
  private readonly channel = new BroadcastChannel(NAME);

  private constructor(private readonly database: IDBDatabase) {
    // A tab with a newer version of the page must be able to change the database.
    database.onversionchange = () => database.close();
  }

  static async open(): Promise<Store> {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    return new Store(await result(request));
  }

  /** Calls `listener` for changes; `here`: made by this tab. */
  listen(listener: (change: Change, here: boolean) => void): void {
    this.channel.onmessage = (event) => listener(event.data as Change, false);
    this.here = (change) => listener(change, true);
  }

  private here: (change: Change) => void = () => undefined;

  private tell(change: Change): void {
    this.channel.postMessage(change);
    this.here(change);
  }

  /** All conversations, the one that changed last first. */
  async conversations(): Promise<Conversation[]> {
    const all: Conversation[] = await result(this.database.transaction("conversations").objectStore("conversations").getAll());
    return all.sort((a, b) => b.updated - a.updated);
  }

  async conversation(id: string): Promise<Conversation | undefined> {
    return result(this.database.transaction("conversations").objectStore("conversations").get(id));
  }

  async messages(id: string): Promise<Message[]> {
    return result(this.database.transaction("messages").objectStore("messages").index("conversation").getAll(id));
  }

  async message(id: string): Promise<Message | undefined> {
    return result(this.database.transaction("messages").objectStore("messages").get(id));
  }

  /** Adds messages, each the parent of the next, and shows the branch that ends with them. `created`: their conversation,
   * if it is new. */
  async add(messages: [Message, ...Message[]], created: Conversation | null): Promise<void> {
    const last = messages.at(-1) as Message;
    await this.write(({ conversations, messages: store }) => {
      if (created) conversations.put(created);
      change(conversations, last.conversation, (conversation) => {
        for (const message of messages) store.put(message);
        conversation.leaf = last.id;
        conversation.updated = Date.now();
      });
    });
    this.tell({ conversation: last.conversation });
  }

  /** Writes a message again, unless its conversation was removed meanwhile. */
  async save(message: Message): Promise<void> {
    await this.write(({ conversations, messages }) => {
      conversations.getKey(message.conversation).onsuccess = (event) => {
        if ((event.target as IDBRequest).result !== undefined) messages.put(message);
      };
    });
    this.tell({ conversation: message.conversation, message: message.id });
  }

  /** Changes a conversation; does nothing if it was removed. */
  async update(id: string, alter: (conversation: Conversation) => void): Promise<void> {
    await this.write(({ conversations }) => change(conversations, id, alter));
    this.tell({ conversation: id });
  }

  /** Removes a conversation with its messages and returns both. */
  async remove(id: string): Promise<Record | null> {
    const [conversation, messages] = await Promise.all([this.conversation(id), this.messages(id)]);
    await this.write((stores) => {
      stores.conversations.delete(id);
      stores.messages.index("conversation").getAllKeys(id).onsuccess = (event) => {
        for (const key of (event.target as IDBRequest<IDBValidKey[]>).result) stores.messages.delete(key);
      };
    });
    this.tell({ conversation: id, removed: true });
    return conversation ? { conversation, messages } : null;
  }

  /** Removes messages; the branch that ends with `leaf` is shown then. */
  async removeMessages(id: string, messages: Message[], leaf: string): Promise<void> {
    await this.write((stores) => {
      for (const message of messages) stores.messages.delete(message.id);
      change(stores.conversations, id, (conversation) => Object.assign(conversation, { leaf }));
    });
    this.tell({ conversation: id });
  }

  /** Every conversation with its messages. */
  async records(): Promise<Record[]> {
    const conversations = await this.conversations();
    return Promise.all(conversations.map(async (conversation) => ({ conversation, messages: await this.messages(conversation.id) })));
  }

  /** Adds what is not there yet; conversations and messages that exist stay as they are. */
  async restore(records: Record[]): Promise<void> {
    await this.write(({ conversations, messages }) => {
      for (const record of records) {
        missing(conversations, record.conversation);
        for (const message of record.messages) missing(messages, message);
      }
    });
    for (const { conversation } of records) this.tell({ conversation: conversation.id });
  }

  /** The ids of the conversations of which the title or a message contains `text`, in any case. */
  async search(text: string): Promise<Set<string>> {
    const wanted = text.toLowerCase();
    const found = new Set((await this.conversations()).filter((one) => one.title.toLowerCase().includes(wanted)).map((one) => one.id));
    const request = this.database.transaction("messages").objectStore("messages").openCursor();
    await new Promise<void>((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve();
        const message = cursor.value as Message;
        if (withFiles(message.text, message.files).toLowerCase().includes(wanted)) found.add(message.conversation);
        cursor.continue();
      };
    });
    return found;
  }

  /** Runs `work` in one transaction over both stores and waits until it is on disk. */
  private write(work: (stores: { conversations: IDBObjectStore; messages: IDBObjectStore }) => void): Promise<void> {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error ?? new Error("the browser refused to store the conversation"));
      work({ conversations: transaction.objectStore("conversations"), messages: transaction.objectStore("messages") });
    });
  }
}

function change(conversations: IDBObjectStore, id: string, alter: (conversation: Conversation) => void): void {
  const request = conversations.get(id) as IDBRequest<Conversation | undefined>;
  request.onsuccess = () => {
    if (!request.result) return;
    alter(request.result);
    conversations.put(request.result);
  };
}

function missing(store: IDBObjectStore, value: { id: string }): void {
  store.getKey(value.id).onsuccess = (event) => {
    if ((event.target as IDBRequest).result === undefined) store.put(value);
  };
}

function result<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
