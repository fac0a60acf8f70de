/* IPv4 packets as bytes: where things are in them, their checksums, and what all packets have to pass. */
#pragma once

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    MOST_PACKET = 65535,
    MOST_SEGMENTS = 64, /* of many in one: UDP_MAX_SEGMENTS of linux/udp.h before Linux 6.9 */
};

/* linux/virtio_net.h: what a TUN puts before a packet, and wants there, in the machine's byte order. */
struct vnet_header {
    uint8_t flags, gso_type;
    uint16_t header_length, gso_size, checksum_start, checksum_offset;
};
enum { NEEDS_CHECKSUM = 1, GSO_NONE = 0, GSO_TCPV4 = 1, GSO_UDP_L4 = 5, GSO_ECN = 0x80 };

/* Where things are in the headers (RFC 791, 793, 768). */
enum {
    IPV4_TOS = 1, IPV4_LENGTH = 2, IPV4_ID = 4, IPV4_FRAGMENT = 6, IPV4_TTL = 8, IPV4_PROTOCOL = 9,
    IPV4_CHECKSUM = 10, IPV4_SOURCE = 12, IPV4_DESTINATION = 16, IPV4_LEAST = 20, IPV4_MOST = 60,
    TCP_SEQUENCE = 4, TCP_ACK = 8, TCP_OFFSET = 12, TCP_FLAGS = 13, TCP_WINDOW = 14, TCP_URGENT = 18,
    TCP_OPTIONS = 20, TCP_MOST = 60, UDP_LENGTH = 4,
};
enum { DONT_FRAGMENT = 0x40, ANY_FRAGMENT = 0x3fff, LATER_FRAGMENT = 0x1fff };
enum { FLAG_FIN = 0x01, FLAG_PSH = 0x08, FLAG_ACK = 0x10, FLAG_CWR = 0x80 };

struct transport {
    uint8_t protocol, gso_type, least, checksum; /* the smallest header, and where the checksum is in it */
};
static const struct transport TCP = {IPPROTO_TCP, GSO_TCPV4, 20, 16};
static const struct transport UDP = {IPPROTO_UDP, GSO_UDP_L4, 8, 6};

static inline uint16_t get16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }
static inline uint32_t get32(const uint8_t *at) { return (uint32_t)get16(at) << 16 | get16(at + 2); }
static inline void put16(uint8_t *at, uint16_t value) { at[0] = value >> 8, at[1] = (uint8_t)value; }
static inline void put32(uint8_t *at, uint32_t value) { put16(at, value >> 16), put16(at + 2, (uint16_t)value); }

static inline size_t smaller(size_t one, size_t other) { return one < other ? one : other; }

/* Add to a one's complement sum (RFC 1071), which is in memory order: that is the same, with bytes swapped. */
static inline uint64_t add(uint64_t sum, const uint8_t *data, size_t length)
{
    uint64_t words = 0;
    size_t at = 0;
    uint16_t last = 0;
    for (; at + 4 <= length; at += 4) { /* The compiler makes vector instructions of this. */
        uint32_t word;
        memcpy(&word, data + at, 4);
        words += word;
    }
    for (; at < length; at += 2, last = 0) {
        memcpy(&last, data + at, smaller(2, length - at));
        words += last;
    }
    return sum + words;
}

static inline uint16_t fold(uint64_t sum)
{
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

/* The same number in one's complement, but in UDP a checksum of 0 says that there is none. */
static inline void put_checksum(uint8_t *at, uint64_t sum)
{
    uint16_t checksum = (uint16_t)~fold(sum);
    if (checksum == 0)
        checksum = 0xffff;
    memcpy(at, &checksum, 2);
}

static inline size_t ip_header(const uint8_t *ip) { return (size_t)(ip[0] & 15) * 4; }
static inline size_t tcp_header(const uint8_t *tcp) { return (size_t)(tcp[TCP_OFFSET] >> 4) * 4; }

static inline void put_ip_checksum(uint8_t *ip)
{
    uint16_t checksum;
    put16(ip + IPV4_CHECKSUM, 0);
    checksum = (uint16_t)~fold(add(0, ip, ip_header(ip)));
    memcpy(ip + IPV4_CHECKSUM, &checksum, 2);
}

static inline uint64_t pseudo_header(const uint8_t *ip, size_t length)
{
    return add(htons(ip[IPV4_PROTOCOL]) + (uint64_t)htons((uint16_t)length), ip + IPV4_SOURCE, 8);
}

/* The length of the packet of which so many bytes are there; 0 when it is cut off or no IPv4 packet at all. */
static inline size_t packet_length(const uint8_t *ip, size_t there)
{
    size_t length;
    if (there < IPV4_LEAST || ip[0] >> 4 != 4 || ip_header(ip) < IPV4_LEAST)
        return 0;
    length = get16(ip + IPV4_LENGTH);
    return length < ip_header(ip) || length > there ? 0 : length;
}

/* Both ends of the tunnel do it, as flannel's proxy does. False when the packet has come far enough. */
static inline bool decrement_ttl(uint8_t *ip)
{
    uint32_t checksum = get16(ip + IPV4_CHECKSUM) + 0x100u; /* RFC 1141; a wrong one stays wrong */
    if (ip[IPV4_TTL] <= 1)
        return false;
    ip[IPV4_TTL]--;
    put16(ip + IPV4_CHECKSUM, (uint16_t)(checksum + (checksum >> 16)));
    return true;
}
