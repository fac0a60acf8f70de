// A kernel that lacks one kind of network device, for LD_PRELOAD: asks for a kind that no kernel has instead,
// so that the kernel itself refuses. MISSING_KIND names the kind, as in IFLA_INFO_KIND.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

ssize_t send(int socket, const void *data, size_t size, int flags) {
    static ssize_t (*real)(int, const void *, size_t, int);
    const char *kind = getenv("MISSING_KIND");
    const uint16_t info_kind = 1; // linux/if_link.h: IFLA_INFO_KIND
    char attribute[64];
    if (!real) real = (ssize_t (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send");
    if (!real || !kind || strlen(kind) + 1 > sizeof attribute - sizeof info_kind) abort();
    size_t length = sizeof info_kind + strlen(kind);
    memcpy(attribute, &info_kind, sizeof info_kind);
    memcpy(attribute + sizeof info_kind, kind, strlen(kind));
    const char *found = memmem(data, size, attribute, length);
    if (!found) return real(socket, data, size, flags);
    char *copy = malloc(size);
    if (!copy) abort();
    memcpy(copy, data, size);
    memset(copy + (found - (const char *)data) + sizeof info_kind, '-', strlen(kind));
    ssize_t sent = real(socket, copy, size, flags);
    free(copy);
    return sent;
}
