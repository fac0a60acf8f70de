/* The native data plane of the udp backend: raw IPv4 packets between a TUN and a UDP socket.
 *
 * Two loops, each for a thread of its own: udp_pump_from_tun and udp_pump_from_wire. The kernel hands over and
 * takes back many packets of a flow as one (vnet headers on the TUN, UDP_SEGMENT and UDP_GRO on the socket),
 * and this is where the speed comes from. On the wire each packet is a datagram of its own, as it always was.
 *
 * Neither the wire nor a container is trusted: every length is checked before it is used, and packets become
 * one only after their checksums were found right, since the kernel makes new ones for what they became.
 *
 * native.py loads this with ctypes. Addresses and ports come and go in host byte order.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* What native.py asks for. */
enum { VNET_HEADER = 1, MERGE_UDP = 2, SEGMENT_SENDS = 4, ACCEPT_ANY = 8 };

/* Each is counted by one thread alone; the two have a cache line each. Equal names are added up. */
enum counter {
    SENT_PACKETS, SENT_BYTES, SENT_NO_ROUTE, SENT_TTL, SENT_MALFORMED, SEND_FAILED, ANSWER_FAILED,
    RECEIVED_PACKETS = 8, RECEIVED_BYTES, NOT_A_PEER, RECEIVED_TTL, RECEIVED_MALFORMED, WRITE_FAILED, COUNTERS,
};

/* A map in an array that is sorted by key: lookups are what counts. */
struct entry { uint64_t key; uint32_t value; };
struct table { struct entry *entries; size_t used, room; };

struct pump {
    _Alignas(64) _Atomic uint64_t counters[COUNTERS];
    _Alignas(64) int tun, socket, stop;
    unsigned features;
    uint32_t address;
    uint16_t port;
    size_t vnet; /* bytes before each packet on the TUN */
    atomic_bool stopped;
    pthread_rwlock_t lock; /* of what follows */
    struct table subnets;   /* prefix length and network -> endpoint */
    struct table endpoints; /* endpoint -> number of its subnets */
    unsigned lengths[33];   /* number of subnets of each prefix length */
};

static inline void count(struct pump *pump, enum counter what, uint64_t more)
{
    uint64_t now = atomic_load_explicit(&pump->counters[what], memory_order_relaxed);
    atomic_store_explicit(&pump->counters[what], now + more, memory_order_relaxed);
}

static inline bool stopped(struct pump *pump)
{
    return atomic_load_explicit(&pump->stopped, memory_order_relaxed);
}

/* Wait until a descriptor is ready, or the pump is to stop. */
void wait_for(struct pump *pump, int descriptor, short events);

/* Where a packet has to go: the longest prefix wins. False when no subnet holds its destination. */
bool find_route(struct pump *pump, uint32_t destination, uint32_t *endpoint);

/* Is this where a peer, or with ACCEPT_ANY anybody, may send from? */
bool accepts(struct pump *pump, uint32_t source);

void udp_pump_stop(struct pump *pump);
