/* From the wire to the TUN: consecutive segments of a flow become one, in the same order. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "packet.h"
#include "pump.h"

#ifndef UDP_GRO
#define UDP_GRO 104 /* linux/udp.h */
#endif

enum { DATAGRAMS = 8, FLOWS = 32 }; /* of one batch */

/* Consecutive segments of one flow that are to become one. */
struct flow {
    uint8_t *ip; /* the first of them */
    const struct transport *transport;
    size_t header, segment, bytes; /* bytes of all headers, and of payload: of the first, of all */
    unsigned segments;
    struct iovec part[1 + MOST_SEGMENTS]; /* vnet header, first packet, payloads of the others */
};

struct inbox {
    int error;
    size_t flows;
    struct flow *open[FLOWS], flow[FLOWS];
    struct mmsghdr header[DATAGRAMS];
    struct sockaddr_in from[DATAGRAMS];
    struct iovec part[DATAGRAMS];
    _Alignas(struct cmsghdr) char control[DATAGRAMS][CMSG_SPACE(sizeof(int))];
    uint8_t data[DATAGRAMS][MOST_PACKET];
};

/* Write to the TUN, behind the vnet header for which parts[0] is kept. So many bytes came as segments. */
static void emit(struct pump *pump, struct inbox *box, struct vnet_header vnet, struct iovec *parts,
                 unsigned segments, size_t bytes)
{
    parts[0] = (struct iovec){&vnet, pump->vnet};
    while (writev(pump->tun, parts, (int)segments + 1) < 0) {
        if (stopped(pump) || (errno != EAGAIN && errno != EINTR)) {
            count(pump, WRITE_FAILED, segments);
            if (errno == EBADFD) /* The TUN has gone, and with it all that was to come. */
                box->error = errno;
            return;
        }
        if (errno == EAGAIN)
            wait_for(pump, pump->tun, POLLOUT);
    }
    count(pump, RECEIVED_PACKETS, segments);
    count(pump, RECEIVED_BYTES, bytes);
}

static void emit_packet(struct pump *pump, struct inbox *box, uint8_t *ip, size_t length)
{
    struct iovec parts[2] = {[1] = {ip, length}};
    emit(pump, box, (struct vnet_header){0}, parts, 1, length);
}

static void close_flow(struct pump *pump, struct inbox *box, size_t number)
{
    struct flow *flow = box->open[number];
    struct vnet_header vnet = {0};
    box->open[number] = box->open[--box->flows];
    box->open[box->flows] = flow;
    if (flow->segments > 1) {
        size_t length = flow->header - IPV4_LEAST + flow->bytes;
        uint8_t *l4 = flow->ip + IPV4_LEAST;
        vnet = (struct vnet_header){NEEDS_CHECKSUM, flow->transport->gso_type, (uint16_t)flow->header,
                                    (uint16_t)flow->segment, IPV4_LEAST, flow->transport->checksum};
        put16(flow->ip + IPV4_LENGTH, (uint16_t)(IPV4_LEAST + length));
        put_ip_checksum(flow->ip);
        if (flow->transport == &UDP)
            put16(l4 + UDP_LENGTH, (uint16_t)length);
        uint16_t begun = fold(pseudo_header(flow->ip, length)); /* The kernel finishes it. */
        memcpy(l4 + flow->transport->checksum, &begun, 2);
    }
    emit(pump, box, vnet, flow->part, flow->segments, flow->segments * flow->header + flow->bytes);
}

static void close_flows(struct pump *pump, struct inbox *box)
{
    while (box->flows)
        close_flow(pump, box, box->flows - 1);
}

static size_t find_flow(const struct inbox *box, const uint8_t *ip)
{
    size_t number = 0;
    for (; number < box->flows; number++) {
        const uint8_t *other = box->open[number]->ip;
        if (other[IPV4_PROTOCOL] == ip[IPV4_PROTOCOL] && !memcmp(other + IPV4_SOURCE, ip + IPV4_SOURCE, 12))
            break; /* addresses and ports */
    }
    return number;
}

/* Is it of a flow at all, so that its order matters only there? */
static const struct transport *transport_of(const uint8_t *ip, size_t length)
{
    const struct transport *transport = ip[IPV4_PROTOCOL] == IPPROTO_TCP ? &TCP : &UDP;
    bool is = ip[0] == 0x45 && !(get16(ip + IPV4_FRAGMENT) & ANY_FRAGMENT)
        && ip[IPV4_PROTOCOL] == transport->protocol && length >= (size_t)IPV4_LEAST + transport->least;
    return is ? transport : NULL;
}

/* The bytes of headers of a segment that may become one with others, 0 of one that may not. */
static size_t mergeable(const struct pump *pump, const uint8_t *ip, size_t length,
                        const struct transport *transport)
{
    const uint8_t *l4 = ip + IPV4_LEAST;
    size_t header = transport == &TCP ? tcp_header(l4) : UDP.least;
    bool plain = transport == &TCP
        ? (l4[TCP_FLAGS] & ~FLAG_PSH) == FLAG_ACK
        : pump->features & MERGE_UDP && get16(l4 + UDP_LENGTH) == length - IPV4_LEAST && get16(l4 + UDP.checksum);
    if (!(pump->features & VNET_HEADER) || !plain || header < transport->least || IPV4_LEAST + header >= length)
        return 0;
    if (fold(add(0, ip, IPV4_LEAST)) != 0xffff)
        return 0;
    if (fold(add(pseudo_header(ip, length - IPV4_LEAST), l4, length - IPV4_LEAST)) != 0xffff)
        return 0;
    return IPV4_LEAST + header;
}

static bool continues_tcp(const struct flow *flow, const uint8_t *tcp)
{
    const uint8_t *first = flow->ip + IPV4_LEAST;
    return get32(tcp + TCP_SEQUENCE) == (uint32_t)(get32(first + TCP_SEQUENCE) + flow->bytes)
        && !memcmp(tcp + TCP_ACK, first + TCP_ACK, TCP_FLAGS - TCP_ACK)
        && !memcmp(tcp + TCP_WINDOW, first + TCP_WINDOW, 2) && !memcmp(tcp + TCP_URGENT, first + TCP_URGENT, 2)
        && !memcmp(tcp + TCP_OPTIONS, first + TCP_OPTIONS, flow->header - IPV4_LEAST - TCP_OPTIONS);
}

/* Would the kernel, when it cuts the whole again, make just this segment? */
static bool continues(const struct flow *flow, const uint8_t *ip, size_t header, size_t size)
{
    const uint8_t *first = flow->ip;
    uint16_t next_id = (uint16_t)(get16(first + IPV4_ID) + flow->segments);
    return flow->header == header && size <= flow->segment && flow->segments < MOST_SEGMENTS
        && header + flow->bytes + size <= MOST_PACKET
        && ip[IPV4_TOS] == first[IPV4_TOS] && ip[IPV4_TTL] == first[IPV4_TTL]
        && ip[IPV4_FRAGMENT] == first[IPV4_FRAGMENT]
        && (ip[IPV4_FRAGMENT] & DONT_FRAGMENT || get16(ip + IPV4_ID) == next_id)
        && (flow->transport == &UDP || continues_tcp(flow, ip + IPV4_LEAST));
}

static void open_flow(struct pump *pump, struct inbox *box, uint8_t *ip, size_t length, size_t header,
                      const struct transport *transport)
{
    if (box->flows == FLOWS)
        close_flows(pump, box);
    struct flow *flow = box->open[box->flows++];
    flow->ip = ip, flow->transport = transport;
    flow->header = header, flow->segment = flow->bytes = length - header;
    flow->segments = 1;
    flow->part[1] = (struct iovec){ip, length};
}

/* A packet of a flow: joined to those before it, kept for those to come, or sent on behind what was kept. */
static void merge(struct pump *pump, struct inbox *box, uint8_t *ip, size_t length,
                  const struct transport *transport)
{
    size_t number = find_flow(box, ip), header = mergeable(pump, ip, length, transport), size = length - header;
    bool push = transport == &TCP && ip[IPV4_LEAST + TCP_FLAGS] & FLAG_PSH;
    if (number < box->flows) {
        struct flow *flow = box->open[number];
        if (header && continues(flow, ip, header, size)) {
            flow->part[++flow->segments] = (struct iovec){ip + header, size};
            flow->bytes += size;
            if (push)
                flow->ip[IPV4_LEAST + TCP_FLAGS] |= FLAG_PSH;
            if (push || size < flow->segment)
                close_flow(pump, box, number);
            return;
        }
        close_flow(pump, box, number);
    }
    if (header && !push)
        open_flow(pump, box, ip, length, header, transport);
    else
        emit_packet(pump, box, ip, length);
}

static void take_packet(struct pump *pump, struct inbox *box, uint8_t *ip, size_t there)
{
    size_t length = packet_length(ip, there);
    const struct transport *transport;
    if (!length) {
        count(pump, RECEIVED_MALFORMED, 1);
    } else if (!decrement_ttl(ip)) {
        count(pump, RECEIVED_TTL, 1);
    } else if ((transport = transport_of(ip, length))) {
        merge(pump, box, ip, length, transport);
    } else { /* A fragment, ICMP or the like: whatever it belongs to must not overtake it, nor it them. */
        close_flows(pump, box);
        emit_packet(pump, box, ip, length);
    }
}

/* The size of each of several datagrams that the kernel handed over as one. */
static size_t gro_size(struct msghdr *header, size_t length)
{
    for (struct cmsghdr *control = CMSG_FIRSTHDR(header); control; control = CMSG_NXTHDR(header, control))
        if (control->cmsg_level == IPPROTO_UDP && control->cmsg_type == UDP_GRO) {
            int size;
            memcpy(&size, CMSG_DATA(control), sizeof size);
            return size > 0 ? smaller((size_t)size, length) : length;
        }
    return length;
}

static void take_datagrams(struct pump *pump, struct inbox *box, size_t number)
{
    struct msghdr *header = &box->header[number].msg_hdr;
    size_t length = box->header[number].msg_len, size = gro_size(header, length);
    if (!length || header->msg_flags & MSG_TRUNC)
        count(pump, RECEIVED_MALFORMED, 1);
    else if (!accepts(pump, ntohl(box->from[number].sin_addr.s_addr)))
        count(pump, NOT_A_PEER, (length + size - 1) / size);
    else
        for (size_t at = 0; at < length; at += size)
            take_packet(pump, box, box->data[number] + at, smaller(size, length - at));
}

static int receive(struct pump *pump, struct inbox *box)
{
    for (size_t number = 0; number < DATAGRAMS; number++) {
        box->part[number] = (struct iovec){box->data[number], MOST_PACKET};
        box->header[number].msg_hdr = (struct msghdr){
            .msg_name = &box->from[number], .msg_namelen = sizeof box->from[number],
            .msg_iov = &box->part[number], .msg_iovlen = 1,
            .msg_control = box->control[number], .msg_controllen = sizeof box->control[number]};
    }
    int got = recvmmsg(pump->socket, box->header, DATAGRAMS, MSG_DONTWAIT, NULL);
    if (got < 0 && errno == EAGAIN)
        wait_for(pump, pump->socket, POLLIN);
    else if (got < 0 && errno != EINTR)
        return errno;
    for (int number = 0; number < got; number++)
        take_datagrams(pump, box, (size_t)number);
    close_flows(pump, box);
    return box->error;
}

/* Carry packets this way, likewise. */
EXPORT int udp_pump_from_wire(struct pump *pump)
{
    struct inbox *box = calloc(1, sizeof *box);
    int error = box ? 0 : ENOMEM;
    for (size_t number = 0; box && number < FLOWS; number++)
        box->open[number] = &box->flow[number];
    while (!error && !stopped(pump))
        error = receive(pump, box);
    free(box);
    udp_pump_stop(pump);
    return error;
}
