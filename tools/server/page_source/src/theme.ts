/* Runs before anything is drawn, so that the page does not flash in the wrong colours. */

import { applyTheme } from "./settings";

applyTheme();
addEventListener("storage", applyTheme); // another tab changed it
