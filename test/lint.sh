#!/bin/sh
# make lint, in TAP: sections in order and under their own banner, lines that are not too long, no compiler warnings,
# sft.h as C++17, and the README's option table as the program prints it. CC is the compiler (gcc).
cd "$(dirname "$0")/.." || exit 1
LC_ALL=C.UTF-8 && export LC_ALL
CC=${CC:-gcc}
out=$(mktemp) failed=0
trap 'rm -f "$out" "$out.table"' EXIT
report() { # report NAME: what $out holds are the faults
    if [ -s "$out" ]; then head -n 30 "$out"; echo "not ok - $1"; failed=1; else echo "ok - $1"; fi
}

# Sections. Table of contents: "       [5] ops  ..."; a banner is a line of ='s, then "   [5] ops: title", then ='s. In sft.h the
# banners before SFT_IMPLEMENTATION are the declarations', those behind it the bodies'; kernels.cu has its own.
sections() {
    awk '
    function fault(text) { printf "%s, line %d: %s\n", FILENAME, FNR, text }
    FNR == 1 { part = FILENAME == "sft.h" ? "declarations" : FILENAME; last = 0; fence = 0 }
    FILENAME == "sft.h" && /^#ifdef SFT_IMPLEMENTATION/ { part = "bodies"; last = 0; id = 0 }
    FILENAME == "sft.h" && /^       \[[0-9]+\] / { split($1, a, /[][]/); toc[a[2] + 0] = $2 }
    /^\/\* =+$/ { fence = 1; next }
    fence && /^   \[[0-9]+\] / {
        split($1, a, /[][]/); id = a[2] + 0; name = $2; sub(/:$/, "", name); seen[part]++
        if (id <= last) fault("[" id "] stands behind [" last "]")
        last = id
        if (toc[id] != name) fault("[" id "] " name " is \"" toc[id] "\" in the table of contents")
        if (part == "declarations") { title[id] = $0; declared[id] = 1 }
        else if (part == "bodies" && title[id] != $0) fault("the declarations say:" title[id])
        if (part == "declarations") for (i in toc) if (i + 0 > 0 && i + 0 < id && !(i in declared)) fault("[" i "] has no declarations before [" id "]")
    }
    { fence = 0 }
    # A function that a section declares is defined under the same section.
    part == "declarations" && id && /^[a-zA-Z].*[ *]sft_[a-z0-9_]+\(.*\)/ && !/^(static|SFT_HD|#|typedef)/ {
        line = $0; sub(/\(.*/, "", line); sub(/.*[ *]/, "", line); home[line] = id
    }
    part == "bodies" && /^[a-zA-Z].*[ *]sft_[a-z0-9_]+\(.*\{/ && !/^(static|SFT_HD|#|typedef)/ {
        line = $0; sub(/\(.*/, "", line); sub(/.*[ *]/, "", line)
        if ((line in home) && home[line] != id) fault(line " is declared in [" home[line] "] and defined in [" id "]")
    }
    END { if (!seen["declarations"] || !seen["bodies"]) print "no banners were found" }' "$@"
}
sections sft.h $([ -f kernels.cu ] && echo kernels.cu) >"$out"
report "sections agree and stand in order"

# Columns, but for tables set by hand between clang-format off and on, and banners..
width=${WIDTH:-120}
for f in sft.h train.c tokenizer.c kernels.cu test/*.[ch]; do
    [ -f "$f" ] && sed -e '/clang-format off/,/clang-format on/s/.*//' "$f" | grep -v -n '^\(/\*\|  \) =*\( \*/\)\{0,1\}$' | grep "^[0-9]*:.\{$((width + 1)),\}" |
        sed "s|^\([0-9]*\):.*|$f, line \1: longer than $width columns|"
done >"$out"
report "lines are at most $width columns"

openmp=$(echo 'int main(void) { return 0; }' | $CC -x c - -fopenmp -o /dev/null 2>/dev/null && echo -fopenmp || echo -DSFT_NO_OPENMP -Wno-unknown-pragmas)
for f in train.c tokenizer.c test/test_*.c test/bench*.c; do
    [ -f "$f" ] && $CC -std=gnu11 -Wall -Wextra -Wno-clobbered -Werror -O1 $openmp -fsyntax-only "$f" 2>&1
done >"$out"
report "no compiler warnings"

if command -v g++ >/dev/null; then
    echo '#include "sft.h"' | g++ -std=c++17 -Wall -Wextra -Werror -I. -fsyntax-only -x c++ - >"$out" 2>&1
    report "sft.h's declarations are C++17"
else echo "ok - sft.h's declarations are C++17 # SKIP there is no g++"; fi

# make options prints the table; in the README it stands between two comments.
if grep -q '<!-- options -->' README.md 2>/dev/null; then
    make --no-print-directory -s options CC="$CC" >"$out.table" 2>"$out" && sed -n '/<!-- options -->/,/<!-- end of options -->/p' README.md | sed '1d;$d' | diff - "$out.table" >"$out"
    report "the README's options are the program's"
else echo "ok - the README's options are the program's # SKIP README.md has no <!-- options --> yet"; fi
exit $failed
