#!/bin/sh
# Runs fuzz targets (build/fuzz_NAME) for FUZZ_SECONDS each, 10 unless set, and reports in TAP. No targets built: skipped
# by name. A finding is kept as build/fuzz_NAME.crash; repeat it with build/fuzz_NAME build/fuzz_NAME.crash.
cd "$(dirname "$0")/.." || exit 1
failed=0
# What bad input leaves behind is not freed: a long run starts anew when its memory is used up.
[ "${FUZZ_SECONDS:-10}" -gt 60 ] && anew="-fork=1 -ignore_ooms=1"
for source in test/fuzz_*.c; do
    name=$(basename "$source" .c)
    if [ ! -x "build/$name" ]; then
        echo "ok - $name # SKIP clang's libFuzzer is not here"
        continue
    fi
    corpus=$(mktemp -d) log=$(mktemp)
    [ -d "test/seeds/${name#fuzz_}" ] && cp "test/seeds/${name#fuzz_}"/* "$corpus"
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 "build/$name" -max_total_time="${FUZZ_SECONDS:-10}" -max_len=4096 \
        -timeout=10 -rss_limit_mb=8192 -close_fd_mask=3 -print_final_stats=1 $anew -exact_artifact_path="build/$name.crash" \
        "$corpus" >"$log" 2>&1
    if [ $? -eq 0 ]; then echo "ok - $name: $(sed -n 's/.*number_of_executed_units: *//p' "$log") inputs"
    else failed=1; tail -n 40 "$log"; echo "not ok - $name: see build/$name.crash"; fi
    rm -rf "$corpus" "$log" /dev/shm/sft_fuzz_?????? /tmp/sft_fuzz_??????
done
exit $failed
