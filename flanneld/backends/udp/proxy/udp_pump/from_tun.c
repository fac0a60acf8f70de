/* From the TUN to the peers: packets that come as many in one are cut, and go out many in one send. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "packet.h"
#include "pump.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103 /* linux/udp.h */
#endif

enum {
    MOST_DATAGRAM = 65507, /* what UDP over IPv4 carries */
    HEADERS = IPV4_MOST + TCP_MOST,
    PARTS = 1024, MESSAGES = 256, ARENA = 1 << 20, /* of one batch */
};

struct packet {
    uint8_t *ip;
    size_t length;
    const struct transport *transport; /* of many packets in one; NULL for a packet that is only itself */
    size_t header, segment;            /* then: bytes of all headers, and of payload for each of them */
};

static bool finish_checksum(const struct packet *packet, const struct vnet_header *vnet)
{
    size_t start = vnet->checksum_start, at = start + vnet->checksum_offset;
    if (start < ip_header(packet->ip) || at + 2 > packet->length)
        return false;
    put_checksum(packet->ip + at, add(0, packet->ip + start, packet->length - start));
    return true;
}

static bool parse_many(struct packet *packet, const struct vnet_header *vnet, const struct transport *transport)
{
    size_t ip = ip_header(packet->ip);
    if (packet->ip[IPV4_PROTOCOL] != transport->protocol || packet->length < ip + transport->least)
        return false;
    packet->transport = transport;
    packet->segment = vnet->gso_size;
    packet->header = ip + (transport == &TCP ? tcp_header(packet->ip + ip) : transport->least);
    return packet->segment && packet->header >= ip + transport->least && packet->header < packet->length;
}

/* Take a packet for what the TUN says that it is, and finish the checksum where this was left to us. */
static bool parse(const struct pump *pump, uint8_t *data, size_t got, struct packet *packet)
{
    struct vnet_header vnet = {0};
    if (got < pump->vnet)
        return false;
    memcpy(&vnet, data, pump->vnet);
    *packet = (struct packet){.ip = data + pump->vnet};
    packet->length = packet_length(packet->ip, got - pump->vnet);
    if (!packet->length)
        return false;
    switch (vnet.gso_type & ~GSO_ECN) {
    case GSO_NONE:
        return !(vnet.flags & NEEDS_CHECKSUM) || finish_checksum(packet, &vnet);
    case GSO_TCPV4:
        return parse_many(packet, &vnet, &TCP);
    case GSO_UDP_L4:
        return parse_many(packet, &vnet, &UDP);
    default:
        return false;
    }
}

/* The headers of the packet of this number among many in one. */
static void put_headers(uint8_t *ip, const struct packet *many, unsigned number, size_t size, bool last)
{
    size_t start = ip_header(many->ip), at = number * many->segment;
    uint8_t *l4 = ip + start, *checksum = l4 + many->transport->checksum;
    memcpy(ip, many->ip, many->header);
    put16(ip + IPV4_LENGTH, (uint16_t)(many->header + size));
    put16(ip + IPV4_ID, (uint16_t)(get16(ip + IPV4_ID) + number));
    put_ip_checksum(ip);
    if (many->transport == &TCP) {
        put32(l4 + TCP_SEQUENCE, (uint32_t)(get32(l4 + TCP_SEQUENCE) + at));
        l4[TCP_FLAGS] &= (uint8_t)~((last ? 0 : FLAG_FIN | FLAG_PSH) | (number ? FLAG_CWR : 0));
    } else {
        put16(l4 + UDP_LENGTH, (uint16_t)(many->header - start + size));
    }
    put16(checksum, 0);
    put_checksum(checksum, add(add(pseudo_header(ip, many->header - start + size), l4, many->header - start),
                               many->ip + many->header + at, size));
}

/* Tell the sender, as flannel's proxy does and under the same conditions. */
static void net_unreachable(struct pump *pump, const struct packet *packet)
{
    uint8_t first[HEADERS], message[sizeof(struct vnet_header) + 28 + IPV4_MOST + 8] = {0};
    uint8_t *ip = message + pump->vnet, *icmp = ip + 20;
    const uint8_t *quoted = packet->ip;
    size_t quote = ip_header(quoted) + 8;
    if (quoted[IPV4_PROTOCOL] == IPPROTO_ICMP || get16(quoted + IPV4_FRAGMENT) & LATER_FRAGMENT
        || ip_header(quoted) >= IPV4_MOST || packet->length < quote)
        return;
    if (packet->transport) { /* Quote a packet as it would have been sent. */
        size_t payload = packet->length - packet->header, size = smaller(payload, packet->segment);
        put_headers(first, packet, 0, size, size == payload);
        quoted = first;
    }
    ip[0] = 0x45, ip[IPV4_TTL] = 8, ip[IPV4_PROTOCOL] = IPPROTO_ICMP;
    put16(ip + IPV4_LENGTH, (uint16_t)(28 + quote));
    put32(ip + IPV4_SOURCE, pump->address);
    memcpy(ip + IPV4_DESTINATION, quoted + IPV4_SOURCE, 4);
    put_ip_checksum(ip);
    icmp[0] = 3; /* destination unreachable; code 0: the network */
    memcpy(icmp + 8, quoted, quote);
    put_checksum(icmp + 2, add(0, icmp, 8 + quote));
    if (write(pump->tun, message, pump->vnet + 28 + quote) < 0)
        count(pump, ANSWER_FAILED, 1);
}

/* One send: a datagram, or several of one size to one endpoint, of which only the last may be shorter. */
struct message {
    uint32_t endpoint;
    size_t segment, bytes, first, parts;
    unsigned segments;
    bool closed;
};

struct outbox {
    size_t filled, parts, messages;
    unsigned most_segments;
    int whole, in_parts; /* IP_MTU_DISCOVER for what must stay in one piece, and for what need not */
    struct message message[MESSAGES];
    struct sockaddr_in to[MESSAGES];
    struct mmsghdr header[MESSAGES];
    _Alignas(struct cmsghdr) char control[MESSAGES][CMSG_SPACE(sizeof(uint16_t))];
    struct iovec part[PARTS];
    uint8_t headers[PARTS][HEADERS];
    uint8_t arena[ARENA];
};

static void describe(const struct pump *pump, struct outbox *box, size_t number)
{
    const struct message *message = &box->message[number];
    struct msghdr *header = &box->header[number].msg_hdr;
    box->to[number] = (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons(pump->port), .sin_addr = {htonl(message->endpoint)}};
    *header = (struct msghdr){.msg_name = &box->to[number], .msg_namelen = sizeof box->to[number],
                              .msg_iov = &box->part[message->first], .msg_iovlen = message->parts};
    if (message->segments > 1) {
        uint16_t size = (uint16_t)message->segment;
        header->msg_control = box->control[number];
        header->msg_controllen = sizeof box->control[number];
        struct cmsghdr *control = CMSG_FIRSTHDR(header);
        control->cmsg_len = CMSG_LEN(sizeof size);
        control->cmsg_level = IPPROTO_UDP, control->cmsg_type = UDP_SEGMENT;
        memcpy(CMSG_DATA(control), &size, sizeof size);
    }
}

static void count_sent(struct pump *pump, const struct message *message)
{
    count(pump, SENT_PACKETS, message->segments);
    count(pump, SENT_BYTES, message->bytes);
}

static void send_alone(struct pump *pump, const struct msghdr *header, size_t bytes)
{
    while (sendmsg(pump->socket, header, MSG_DONTWAIT) < 0) {
        if (errno == EAGAIN && !stopped(pump)) {
            wait_for(pump, pump->socket, POLLOUT);
        } else if (errno != EINTR) {
            count(pump, SEND_FAILED, 1);
            return;
        }
    }
    count_sent(pump, &(struct message){.segments = 1, .bytes = bytes});
}

/* flannel's proxy leaves the socket at IP_PMTUDISC_WANT: what fits the MTU has the DF bit, the rest goes in
 * fragments. A send with UDP_SEGMENT gets this bit only under IP_PMTUDISC_DO, which refuses what does not fit.
 * So DO is the rule, and WANT is for what was refused. */
static void discover(const struct pump *pump, const struct outbox *box, int how)
{
    if (box->whole != box->in_parts)
        setsockopt(pump->socket, IPPROTO_IP, IP_MTU_DISCOVER, &how, sizeof how);
}

/* A send was refused. Its datagrams go one by one, in fragments if need be: the route's MTU may be too small. */
static void send_each(struct pump *pump, struct outbox *box, size_t number, int error)
{
    const struct message *message = &box->message[number];
    struct msghdr header = {.msg_name = &box->to[number], .msg_namelen = sizeof box->to[number],
                            .msg_iov = &box->part[message->first]};
    const struct iovec *end = header.msg_iov + message->parts;
    if (message->segments == 1 && error != EMSGSIZE) {
        count(pump, SEND_FAILED, 1);
        return;
    }
    if (error == EIO) /* An interface that makes no checksums; it would refuse each time. */
        box->most_segments = 1;
    discover(pump, box, box->in_parts);
    while (header.msg_iov < end) {
        size_t bytes = 0;
        for (header.msg_iovlen = 0; bytes < message->segment && header.msg_iov + header.msg_iovlen < end;)
            bytes += header.msg_iov[header.msg_iovlen++].iov_len;
        send_alone(pump, &header, bytes);
        header.msg_iov += header.msg_iovlen;
    }
    discover(pump, box, box->whole);
}

static void flush(struct pump *pump, struct outbox *box)
{
    size_t done = 0;
    for (size_t number = 0; number < box->messages; number++)
        describe(pump, box, number);
    while (done < box->messages && !stopped(pump)) {
        int sent = sendmmsg(pump->socket, box->header + done, (unsigned)(box->messages - done), MSG_DONTWAIT);
        for (; sent > 0; sent--)
            count_sent(pump, &box->message[done++]);
        if (sent == 0 || errno == EINTR)
            continue;
        if (errno == EAGAIN)
            wait_for(pump, pump->socket, POLLOUT);
        else
            send_each(pump, box, done, errno), done++;
    }
    box->filled = box->parts = box->messages = 0;
}

static bool fits(const struct outbox *box, const struct message *message, uint32_t endpoint, size_t bytes)
{
    return message->endpoint == endpoint && !message->closed && bytes <= message->segment
        && message->segments < box->most_segments && message->bytes + bytes <= MOST_DATAGRAM;
}

static void make_room(struct pump *pump, struct outbox *box)
{
    if (box->parts + 2 > PARTS || box->messages == MESSAGES)
        flush(pump, box);
}

/* Add a packet, which is in two parts when it was cut out of many in one. Needs room. */
static void enqueue(struct outbox *box, uint32_t endpoint, struct iovec header, struct iovec payload)
{
    size_t bytes = header.iov_len + payload.iov_len;
    struct message *message = box->messages ? &box->message[box->messages - 1] : NULL;
    if (!message || !fits(box, message, endpoint, bytes)) {
        message = &box->message[box->messages++];
        *message = (struct message){.endpoint = endpoint, .segment = bytes, .first = box->parts};
    }
    box->part[box->parts++] = header;
    if (payload.iov_len)
        box->part[box->parts++] = payload;
    message->parts = box->parts - message->first;
    message->segments++;
    message->bytes += bytes;
    message->closed = bytes < message->segment;
}

static void cut(struct pump *pump, struct outbox *box, uint32_t endpoint, const struct packet *many)
{
    size_t size, at = many->header;
    for (unsigned number = 0; at < many->length; number++, at += size) {
        size = smaller(many->length - at, many->segment);
        make_room(pump, box);
        uint8_t *headers = box->headers[box->parts];
        put_headers(headers, many, number, size, at + size == many->length);
        enqueue(box, endpoint, (struct iovec){headers, many->header}, (struct iovec){many->ip + at, size});
    }
}

static void forward(struct pump *pump, struct outbox *box, uint8_t *data, size_t got)
{
    struct packet packet;
    uint32_t endpoint;
    if (!parse(pump, data, got, &packet)) {
        count(pump, SENT_MALFORMED, 1);
    } else if (!find_route(pump, get32(packet.ip + IPV4_DESTINATION), &endpoint)) {
        count(pump, SENT_NO_ROUTE, 1);
        net_unreachable(pump, &packet);
    } else if (!decrement_ttl(packet.ip)) {
        count(pump, SENT_TTL, 1);
    } else if (packet.transport) {
        cut(pump, box, endpoint, &packet);
    } else {
        make_room(pump, box);
        enqueue(box, endpoint, (struct iovec){packet.ip, packet.length}, (struct iovec){0});
    }
}

static int read_packet(struct pump *pump, struct outbox *box)
{
    size_t most = pump->vnet + MOST_PACKET;
    if (box->filled + most > ARENA)
        flush(pump, box);
    uint8_t *data = box->arena + box->filled;
    ssize_t got = read(pump->tun, data, most);
    if (got >= 0) {
        forward(pump, box, data, (size_t)got);
        /* A flush on the way may have been in the midst of this packet, so go on behind it. */
        box->filled = box->messages ? (size_t)(data - box->arena) + (size_t)got : 0;
    } else if (errno == EAGAIN) {
        if (box->messages)
            flush(pump, box);
        else
            wait_for(pump, pump->tun, POLLIN);
    } else if (errno != EINTR) {
        return errno;
    }
    return 0;
}

/* Carry packets one way until the pump is stopped, and end both ways if this one fails. 0, or what failed. */
EXPORT int udp_pump_from_tun(struct pump *pump)
{
    struct outbox *box = calloc(1, sizeof *box);
    socklen_t size = sizeof box->in_parts;
    int error = box ? 0 : ENOMEM;
    if (box) {
        box->most_segments = pump->features & SEGMENT_SENDS ? MOST_SEGMENTS : 1;
        getsockopt(pump->socket, IPPROTO_IP, IP_MTU_DISCOVER, &box->in_parts, &size);
        box->whole = box->in_parts == IP_PMTUDISC_WANT ? IP_PMTUDISC_DO : box->in_parts;
        discover(pump, box, box->whole);
        while (!error && !stopped(pump))
            error = read_packet(pump, box);
        discover(pump, box, box->in_parts);
    }
    free(box);
    udp_pump_stop(pump);
    return error;
}
