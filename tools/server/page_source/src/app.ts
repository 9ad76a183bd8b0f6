/* Opens the store and begins the page. */

import { h } from "./dom";
import { Page } from "./page";
import { Store } from "./store";

async function begin(): Promise<void> {
  let store: Store;
  try {
    store = await Store.open();
  } catch (error) {
    document.body.replaceChildren(h("p", { class: "fatal", role: "alert" }, `This browser does not let the page keep conversations: ${String(error)}`));
    return;
  }
  await new Page(store).begin();
}

void begin();
