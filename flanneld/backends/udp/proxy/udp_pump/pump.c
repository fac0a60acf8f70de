/* The pump as an object: made, stopped, freed, and asked what it has counted. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "packet.h"
#include "pump.h"

static const char *const counter_names[COUNTERS] = {
    [SENT_PACKETS] = "sent_packets", [SENT_BYTES] = "sent_bytes", [SENT_NO_ROUTE] = "no_route",
    [SENT_TTL] = "ttl", [SENT_MALFORMED] = "malformed", [SEND_FAILED] = "send_failed",
    [ANSWER_FAILED] = "write_failed",
    [RECEIVED_PACKETS] = "received_packets", [RECEIVED_BYTES] = "received_bytes", [NOT_A_PEER] = "not_a_peer",
    [RECEIVED_TTL] = "ttl", [RECEIVED_MALFORMED] = "malformed", [WRITE_FAILED] = "write_failed",
};

void wait_for(struct pump *pump, int descriptor, short events)
{
    struct pollfd both[] = {{.fd = descriptor, .events = events}, {.fd = pump->stop, .events = POLLIN}};
    poll(both, 2, -1);
}

/* NULL when resources are short. The descriptors stay the caller's and must outlive the pump. */
EXPORT struct pump *udp_pump_new(int tun, int socket, uint32_t address, uint16_t port, unsigned features)
{
    struct pump *pump = aligned_alloc(_Alignof(struct pump), sizeof *pump);
    if (!pump)
        return NULL;
    memset(pump, 0, sizeof *pump);
    pump->tun = tun, pump->socket = socket, pump->address = address, pump->port = port;
    pump->features = features;
    pump->vnet = features & VNET_HEADER ? sizeof(struct vnet_header) : 0;
    pump->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pump->stop >= 0 && pthread_rwlock_init(&pump->lock, NULL) == 0)
        return pump;
    if (pump->stop >= 0)
        close(pump->stop);
    free(pump);
    return NULL;
}

/* Only when both loops have ended. */
EXPORT void udp_pump_free(struct pump *pump)
{
    close(pump->stop);
    pthread_rwlock_destroy(&pump->lock);
    free(pump->subnets.entries);
    free(pump->endpoints.entries);
    free(pump);
}

/* For good, and from anywhere. */
EXPORT void udp_pump_stop(struct pump *pump)
{
    atomic_store(&pump->stopped, true);
    eventfd_write(pump->stop, 1);
}

EXPORT uint64_t udp_pump_counter(struct pump *pump, unsigned number)
{
    return atomic_load_explicit(&pump->counters[number], memory_order_relaxed);
}

/* NULL for a number that is not in use. */
EXPORT const char *udp_pump_counter_name(unsigned number)
{
    return number < COUNTERS ? counter_names[number] : NULL;
}

EXPORT unsigned udp_pump_counters(void) { return COUNTERS; }
