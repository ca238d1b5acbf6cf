/* What every test file shares: cmocka, the library's bodies, and a way to look at an error instead of dying of it.

   A test file test/test_NAME.c is a program of its own: it includes this header, defines cmocka tests and ends with
   SFT_TEST_MAIN(cmocka_unit_test(a), cmocka_unit_test(b), ...). The Makefile builds and runs every test/test_*.c it
   finds. */
#ifndef SFT_TEST_H
#define SFT_TEST_H
#define SFT_IMPLEMENTATION
#include "../sft.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static jmp_buf test__escape;
static char test__line[4096];
static int test__status;
__attribute__((unused)) static void test__hook(int status, const char *line) {
    test__status = status;
    snprintf(test__line, sizeof test__line, "%s", line);
    longjmp(test__escape, 1);
}
// A statement that dies leaves what it had allocated: the leak checker is not to count that.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#define TEST__LEAKS(on) ((on) ? __lsan_enable() : __lsan_disable())
#else
#define TEST__LEAKS(on) ((void)0)
#endif
// Runs the statement, which must end in sft_die, and leaves the message in test__line and the status in test__status.
#define EXPECT_DEATH(statement)                                                                                        \
    do {                                                                                                               \
        sft_die_hook = test__hook;                                                                                     \
        test__line[0] = 0;                                                                                             \
        TEST__LEAKS(false);                                                                                            \
        if (setjmp(test__escape) == 0) {                                                                               \
            statement;                                                                                                 \
            sft_die_hook = NULL;                                                                                       \
            TEST__LEAKS(true);                                                                                         \
            fail_msg("%s did not fail", #statement);                                                                   \
        }                                                                                                              \
        sft_die_hook = NULL;                                                                                           \
        TEST__LEAKS(true);                                                                                             \
    } while (0)
// As above, and the message must hold `words`.
#define EXPECT_ERROR(statement, words)                                                                                 \
    do {                                                                                                               \
        EXPECT_DEATH(statement);                                                                                       \
        if (!strstr(test__line, words)) fail_msg("expected an error with \"%s\", got: %s", words, test__line);         \
    } while (0)

#define SFT_TEST_MAIN(...)                                                                                             \
    int main(void) {                                                                                                   \
        const struct CMUnitTest tests[] = {__VA_ARGS__};                                                               \
        return cmocka_run_group_tests(tests, NULL, NULL) != 0;                                                         \
    }
#endif
