/* Keeps a box scrolled to its end while its content grows, until the user scrolls up, however little. */

/** So many pixels above the end, on the way down, count as the end. */
const NEAR = 48;

export class Follower {
  private following = true;
  /** Where the box was scrolled to when this was last looked at. */
  private top = 0;

  /** `onChange` is called with whether the end is out of view, after the box was scrolled or changed its size. */
  constructor(
    private readonly box: HTMLElement,
    content: HTMLElement,
    private readonly onChange: (away: boolean) => void = () => undefined,
  ) {
    box.addEventListener("scroll", () => this.look(), { passive: true });
    // Called after layout and before the frame is drawn: text that was added is never seen below the end.
    const observer = new ResizeObserver(() => this.keep());
    observer.observe(box);
    observer.observe(content);
  }

  toEnd(): void {
    this.following = true;
    this.keep();
  }

  /** What is added now does not move the view, even if its end is shown. */
  stay(): void {
    this.following = false;
  }

  private keep(): void {
    if (this.following) this.box.scrollTop = this.box.scrollHeight;
    this.look();
  }

  private look(): void {
    const { scrollTop } = this.box;
    const distance = this.distance();
    if (distance < 2 || (distance < NEAR && scrollTop > this.top)) this.following = true;
    else if (scrollTop < this.top) this.following = false;
    this.top = scrollTop;
    this.onChange(!this.following && distance >= NEAR);
  }

  /** Pixels of the content below the view. */
  private distance(): number {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    return scrollHeight - scrollTop - clientHeight;
  }
}
