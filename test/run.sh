#!/bin/sh
# Runs test programs (cmocka, TAP output) and counts: run.sh PROGRAM ... ; last line "N passed, M failed[, K skipped]".
# A program that dies without a word counts as one failure. Exit status 1 if anything failed or nothing ran. Programs
# run JOBS at a time, 2 unless set: many use a single core.
if [ "$1" = --one ]; then # --one FOLDER PROGRAM: what is said about it, and into FOLDER its counts
    log=$(mktemp "$2/XXXXXX") program=$3 start=$(date +%s)
    CMOCKA_MESSAGE_OUTPUT=TAP OMP_WAIT_POLICY=passive "$program" >"$log" 2>&1
    status=$?
    sed -i 's/^not ok \(.*# SKIP\)/ok \1/' "$log" # as cmocka writes a skipped test
    s=$(grep -c '^ok .*# SKIP' "$log")
    p=$(($(grep -c '^ok ' "$log") - s))
    f=$(grep -c '^not ok ' "$log")
    {
        if [ $status -ne 0 ] && [ "$f" -eq 0 ]; then f=1 && echo "not ok - $program ended with status $status"; fi
        printf '%-40s %3d passed %3d failed %3d skipped %4d s\n' "$(basename "$program")" "$p" "$f" "$s" $(($(date +%s) - start))
        grep '^ok .*# SKIP' "$log"
        [ "$f" -gt 0 ] && grep -v '^ok ' "$log" | tail -n 60
        echo "$p $f $s" >"$log.counts"
    } >"$log.said"
    cat "$log.said"
    exit 0
fi
dir=$(mktemp -d) && trap 'rm -rf "$dir"' EXIT
[ $# -gt 0 ] && printf '%s\0' "$@" | xargs -0 -n 1 -P "${JOBS:-2}" sh "$0" --one "$dir"
cat "$dir"/*.counts 2>/dev/null | awk -v programs=$# '
    { passed += $1; failed += $2; skipped += $3 }
    END {
        failed += programs - NR # whose runner died
        printf "%d passed, %d failed", passed, failed
        if (skipped) printf ", %d skipped", skipped
        printf "\n"
        exit failed > 0 || passed == 0
    }'
