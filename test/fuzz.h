/* What every fuzz target shares. test/fuzz_NAME.c defines LLVMFuzzerTestOneInput and ends what is bad input
   by sft_die, which FUZZ_TRY survives; anything else that ends it is a finding. The Makefile builds every
   test/fuzz_*.c with clang's libFuzzer, AddressSanitizer and UBSan; test/fuzz.sh runs them, from the seeds in
   test/seeds/NAME where there are any. */
#ifndef SFT_FUZZ_H
#define SFT_FUZZ_H
#define SFT_IMPLEMENTATION
#include "../sft.h"
#include <setjmp.h>

static jmp_buf fuzz__escape;
static inline void fuzz__hook(int status, const char *line) {
    (void)line;
    if (status != SFT_BAD_INPUT) abort(); // no input of these may look like a broken machine
    longjmp(fuzz__escape, 1);
}
// Runs the statement; sft_die(SFT_BAD_INPUT) ends it and nothing else.
#define FUZZ_TRY(statement)                                        \
    do {                                                           \
        sft_die_hook = fuzz__hook;                                 \
        if (setjmp(fuzz__escape) == 0) statement;                  \
    } while (0)

static inline char *fuzz_text(const uint8_t *data, size_t size) { // the input as a string
    char *text = (char *)malloc(size + 1);
    memcpy(text, data, size);
    text[size] = 0;
    return text;
}

static inline const char *fuzz_folder(void) { // a folder of this process, in memory where the system has that
    static char folder[40];
    if (!*folder) {
        strcpy(folder, access("/dev/shm", W_OK) ? "/tmp/sft_fuzz_XXXXXX" : "/dev/shm/sft_fuzz_XXXXXX");
        if (!mkdtemp(folder)) abort();
    }
    return folder;
}

static inline void fuzz_file(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f)) abort();
}
#endif
