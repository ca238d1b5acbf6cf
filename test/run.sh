#!/bin/sh
# Runs test programs (cmocka, TAP output) and counts: run.sh PROGRAM ... ; last line "N passed, M failed[, K skipped]".
# A program that dies without a word counts as one failure. Exit status 1 if anything failed or nothing ran.
passed=0 failed=0 skipped=0
log=$(mktemp) && trap 'rm -f "$log"' EXIT
for program; do
    start=$(date +%s)
    CMOCKA_MESSAGE_OUTPUT=TAP OMP_WAIT_POLICY=passive "$program" >"$log" 2>&1
    status=$?
    sed -i 's/^not ok \(.*# SKIP\)/ok \1/' "$log" # as cmocka writes a skipped test
    s=$(grep -c '^ok .*# SKIP' "$log")
    p=$(($(grep -c '^ok ' "$log") - s))
    f=$(grep -c '^not ok ' "$log")
    if [ $status -ne 0 ] && [ "$f" -eq 0 ]; then f=1 && echo "not ok - $program ended with status $status"; fi
    printf '%-40s %3d passed %3d failed %3d skipped %4d s\n' "$(basename "$program")" "$p" "$f" "$s" $(($(date +%s) - start))
    grep '^ok .*# SKIP' "$log"
    [ "$f" -gt 0 ] && grep -v '^ok ' "$log" | tail -n 60
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
[ $skipped -gt 0 ] && echo "$passed passed, $failed failed, $skipped skipped" || echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
