/* What happens to conversations as a whole: they are removed, which can be undone, exported and imported. */

import type { Store } from "./store";
import type { Toasts } from "./toast";
import { download, parse, serialize } from "./transfer";
import type { Record } from "./types";

export class Library {
  constructor(
    private readonly store: Store,
    private readonly toasts: Toasts,
  ) {}

  async remove(id: string): Promise<void> {
    const record = await this.store.remove(id);
    if (record) this.offerUndo(`“${record.conversation.title}” was deleted.`, [record]);
  }

  /** Removes messages of a conversation; `undone` is called when they are back. */
  async removeMessages(record: Record, leaf: string, undone: () => void): Promise<void> {
    await this.store.removeMessages(record.conversation.id, record.messages, leaf);
    this.offerUndo(record.messages.length === 1 ? "The message was deleted." : "The message and what followed it were deleted.", [record], undone);
  }

  async removeAll(): Promise<void> {
    const records = await this.store.records();
    for (const { conversation } of records) await this.store.remove(conversation.id);
    if (records.length > 0) this.offerUndo("All conversations were deleted.", records);
  }

  async exportAll(): Promise<void> {
    download(`mlc-amd-conversations-${new Date().toISOString().slice(0, 10)}.json`, serialize(await this.store.records()));
  }

  async importFile(file: File): Promise<void> {
    try {
      const records = parse(await file.text());
      await this.store.restore(records);
      this.toasts.show(`${records.length} ${records.length === 1 ? "conversation" : "conversations"} imported.`);
    } catch (error) {
      this.toasts.show(error instanceof Error ? error.message : String(error));
    }
  }

  private offerUndo(text: string, removed: Record[], then: () => void = () => undefined): void {
    this.toasts.show(text, { label: "Undo", run: () => void this.store.restore(removed).then(then) });
  }
}
