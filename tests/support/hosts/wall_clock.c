/* Moves the wall clock that Python sees by CLOCK_AHEAD seconds; loaded with LD_PRELOAD.
 *
 * Only calls from the interpreter itself are answered differently. Libraries keep the true time: they wait in the kernel until absolute
 * times (futex, timerfd), which no library can move. Monotonic clocks are moved by the host's time namespace. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

static int (*true_clock_gettime)(clockid_t, struct timespec *);

static double ahead(void) {
    const char *told = getenv("CLOCK_AHEAD");
    return told ? atof(told) : 0.0;
}

static int is_python(void *caller) {
    Dl_info found;
    if (!dladdr(caller, &found) || !found.dli_fname) return 0;
    const char *slash = strrchr(found.dli_fname, '/');
    const char *name = slash ? slash + 1 : found.dli_fname;
    return strncmp(name, "python", 6) == 0 || strncmp(name, "libpython", 9) == 0;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    if (!true_clock_gettime) true_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = true_clock_gettime(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && is_python(__builtin_return_address(0)))
        at->tv_sec += (time_t)ahead();
    return failed;
}
