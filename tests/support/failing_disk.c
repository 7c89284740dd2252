/* Preloaded into a process: fsync and fdatasync of files whose path ends with $FAILING_SUFFIX fail with EIO while the file $FAILING_COUNT
   holds a number above zero, which each failure lowers by one. What was written before stays in the page cache, as on a real disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(int fd) {
    char link[64], path[4096];
    const char *suffix = getenv("FAILING_SUFFIX"), *count = getenv("FAILING_COUNT");
    if (!suffix || !count) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    if ((size_t)size < strlen(suffix) || strcmp(path + size - strlen(suffix), suffix)) return 0;
    FILE *file = fopen(count, "r+");
    int left = 0;
    if (!file) return 0;
    if (fscanf(file, "%d", &left) != 1) left = 0;
    if (left > 0) {
        rewind(file);
        fprintf(file, "%-6d", left - 1);
    }
    fclose(file);
    return left > 0;
}

int fsync(int fd) {
    if (fails(fd)) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}

int fdatasync(int fd) {
    if (fails(fd)) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
