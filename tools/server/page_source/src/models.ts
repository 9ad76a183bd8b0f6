/* The server's models: read at the beginning, when the page is looked at again, and until the server answers. */

import { ApiError, type Model, models } from "./api";

const RETRY_MS = 5000;

export class Models {
  list: Model[] = [];
  /** Why there is no list; null: there is one. */
  failure: string | null = null;
  /** The failure is none: a key is asked for, or a model is being loaded. */
  waiting = false;
  private timer: number | undefined;

  /** `onChange`: list or failure changed. `onUnauthorized`: the server wants a key. */
  constructor(
    private readonly onChange: () => void,
    private readonly onUnauthorized: () => void,
  ) {
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "visible") void this.read();
    });
  }

  async read(): Promise<void> {
    clearTimeout(this.timer);
    let status = 200;
    let retry = RETRY_MS;
    try {
      this.list = await models();
      this.failure = null;
    } catch (error) {
      status = error instanceof ApiError ? error.status : 0;
      if (error instanceof ApiError && error.loading !== null) retry = error.loading;
      this.waiting = status === 401 || (error instanceof ApiError && error.loading !== null);
      this.failure = error instanceof ApiError ? error.message : "The server's answer cannot be understood.";
    }
    this.onChange();
    if (status === 401) this.onUnauthorized();
    // Not after a refusal: the user has to do something first.
    else if (this.failure !== null) this.timer = setTimeout(() => void this.read(), retry);
  }

  /** `wanted`, if the server has it, else its first model. */
  choose(...wanted: (string | null)[]): string | null {
    return wanted.find((id) => this.list.some((model) => model.id === id)) ?? this.list[0]?.id ?? null;
  }

  /** The model will be loaded by the next request for it. */
  isUnloaded(id: string | null): boolean {
    return this.list.some((model) => model.id === id && !model.loaded);
  }

  /** The model is known to take no images. */
  isBlind(id: string | null): boolean {
    return this.list.some((model) => model.id === id && model.sees === false);
  }

  context(id: string | null): number | null {
    return this.list.find((model) => model.id === id)?.context ?? null;
  }
}
