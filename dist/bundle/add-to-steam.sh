#!/bin/sh
# Run once, in Desktop Mode: makes a menu entry that chats with this folder's model, and adds it to Steam, for Gaming Mode.
# The entry itself runs `add-to-steam.sh chat` in a terminal: a chat whose last words stay readable when it cannot start.
here=$(dirname -- "$(readlink -f -- "$0")")

if [ "$1" = chat ]; then
    sh "$here/run.sh" && exit
    echo "Press Enter to close."
    read -r _
    exit 1
fi

# Between the quotes of a desktop entry's Exec line, \ is written as four, " ` $ have two before them, and % is doubled. The last
# expression is for the sed that puts it in.
place=$(printf '%s' "$here" | sed -e 's/\\/\\\\\\\\/g' -e 's/["`$]/\\\\&/g' -e 's/%/%%/g' -e 's/[\\|&]/\\&/g')
entries=${XDG_DATA_HOME:-$HOME/.local/share}/applications
entry=$entries/mlc-amd-@DIGEST@.desktop
mkdir -p "$entries" && sed "s|@HERE@|$place|" "$here/mlc-amd.desktop" >"$entry" && chmod +x "$entry" || exit 1
echo "wrote $entry"
if command -v steamos-add-to-steam >/dev/null; then
    steamos-add-to-steam "$entry" && echo "added to Steam: look under Non-Steam in your library"
else
    echo "in Steam: Games, Add a Non-Steam Game, and choose it from the list"
fi
