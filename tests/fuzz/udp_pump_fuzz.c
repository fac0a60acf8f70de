/* Feeds both loops of the native data plane with whatever may come, and looks at whatever goes out.
 *
 *     udp_pump_fuzz SEED SECONDS [CASE]
 *
 * The linker puts the functions below in the place of the system calls (--wrap): nothing leaves this process,
 * and a case depends on nothing but SEED and its number, which is said when it fails; alone it runs again.
 * Built with the sanitizers. What the pump reads into is poisoned behind the last byte of each packet.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sanitizer/asan_interface.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "packet.h"

struct pump;
struct pump *udp_pump_new(int tun, int socket, uint32_t address, uint16_t port, unsigned features);
void udp_pump_free(struct pump *pump);
void udp_pump_stop(struct pump *pump);
int udp_pump_set_peer(struct pump *pump, uint32_t network, unsigned length, uint32_t endpoint);
void udp_pump_drop_peer(struct pump *pump, uint32_t network, unsigned length);
int udp_pump_from_tun(struct pump *pump);
int udp_pump_from_wire(struct pump *pump);

enum { TUN = 1000, WIRE = 1001, PEER = 0xc0000201, ROUND = 60, CONTROL = 103, RECEIVED = 104 };

static uint64_t state;     /* of the random numbers */
static unsigned long seed, number, given;
static unsigned features, left; /* left: calls until the pump is stopped */
static struct pump *pump;
static uint32_t sequence;
static uint32_t ports; /* of how many flows */
static bool large, calm;  /* packets; and no call is interrupted */

static uint32_t any(void) /* splitmix64 */
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

static uint32_t below(uint32_t limit) { return any() % limit; }
static bool rarely(void) { return below(16) == 0; }

static void check(bool right, const char *what)
{
    if (right)
        return;
    fprintf(stderr, "seed %lu, case %lu: %s\n", seed, number, what);
    abort();
}

/* ---- What comes ---- */

static void fill(uint8_t *at, size_t size)
{
    for (size_t i = 0; i < size; i++)
        at[i] = (uint8_t)any();
}

static void put_l4_checksum(uint8_t *ip, size_t header, size_t length, size_t at)
{
    put16(ip + header + at, 0);
    put_checksum(ip + header + at, add(pseudo_header(ip, length - header), ip + header, length - header));
}

/* A packet that mostly makes sense, of one of a few flows. Returns its length, at most room. */
static size_t make_packet(uint8_t *ip, size_t room)
{
    static const uint8_t protocols[] = {IPPROTO_TCP, IPPROTO_TCP, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_ICMP};
    static const uint16_t payloads[] = {0, 1, 7, 100, 100, 100, 1432, 1432, 1432, 1432};
    size_t header = rarely() ? 20 + 4 * below(11) : 20, tcp = rarely() ? 20 + 4 * below(11) : 20;
    uint8_t protocol = protocols[below(sizeof protocols)], *l4 = ip + header;
    size_t before = header + (protocol == IPPROTO_TCP ? tcp : 8);
    size_t payload = large || below(8) == 0 ? below(66000) : payloads[below(10)];
    if (before + payload > room)
        payload = room - before;
    fill(ip, before + smaller(payload, 64));
    memset(ip + before + smaller(payload, 64), 0x55, payload - smaller(payload, 64));
    ip[0] = (uint8_t)(0x40 | header / 4), ip[IPV4_TOS] = 0, ip[IPV4_PROTOCOL] = protocol;
    ip[IPV4_TTL] = rarely() ? (uint8_t)below(4) : 64;
    put16(ip + IPV4_LENGTH, (uint16_t)(before + payload));
    put16(ip + IPV4_FRAGMENT, rarely() ? (uint16_t)any() : 0x4000);
    put32(ip + IPV4_SOURCE, 0x0a050102), put32(ip + IPV4_DESTINATION, 0x0a050200 + below(6) * 64);
    put_ip_checksum(ip);
    put32(l4, below(ports));
    if (protocol == IPPROTO_TCP) {
        put32(l4 + TCP_SEQUENCE, sequence), put32(l4 + TCP_ACK, 1), put32(l4 + TCP_WINDOW, 500u << 16);
        l4[TCP_OFFSET] = (uint8_t)(tcp / 4 << 4);
        l4[TCP_FLAGS] = rarely() ? (uint8_t)any() : rarely() ? FLAG_ACK | FLAG_PSH : FLAG_ACK;
        sequence += rarely() ? 1 : (uint32_t)payload;
        put_l4_checksum(ip, header, before + payload, TCP.checksum);
    } else if (protocol == IPPROTO_UDP) {
        put16(l4 + UDP_LENGTH, (uint16_t)(8 + payload));
        put_l4_checksum(ip, header, before + payload, UDP.checksum);
    }
    return before + payload;
}

static void mutate(uint8_t *data, size_t size)
{
    for (uint32_t times = 1 + below(3); size && times; times--)
        data[below(4) ? below((uint32_t)smaller(size, 60)) : below((uint32_t)size)] = (uint8_t)any();
}

/* Anything at all of at most so many bytes. */
static size_t make_data(uint8_t *data, size_t room)
{
    size_t size;
    if (rarely()) {
        size = below(rarely() ? (uint32_t)room + 1 : 64);
        fill(data, size);
        return size;
    }
    size = make_packet(data, room);
    if (below(4) == 0)
        mutate(data, size);
    return rarely() ? below((uint32_t)size + 1) : size;
}

static int fail(int error)
{
    errno = error;
    return -1;
}

static bool goes_on(void)
{
    if (left-- > 0)
        return true;
    udp_pump_stop(pump);
    errno = EAGAIN;
    return false;
}

static size_t make_read(uint8_t *data, size_t room)
{
    static const uint8_t kinds[] = {GSO_NONE, GSO_NONE, GSO_TCPV4, GSO_TCPV4 | GSO_ECN, GSO_UDP_L4};
    struct vnet_header vnet = {0};
    size_t head = features & 1 ? sizeof vnet : 0;
    size_t size = head + make_data(data + head, room - head);
    if (!head)
        return size;
    fill((uint8_t *)&vnet, below(8) ? 0 : sizeof vnet);
    vnet.gso_type = rarely() ? (uint8_t)any() : kinds[below(sizeof kinds)];
    vnet.gso_size = (uint16_t)(rarely() ? below(3) : below(2) ? 1432 : 1 + below(3000));
    vnet.flags = below(2) ? NEEDS_CHECKSUM : vnet.flags;
    vnet.checksum_start = rarely() ? (uint16_t)any() : 20;
    vnet.checksum_offset = rarely() ? (uint16_t)any() : below(2) ? 16 : 6;
    memcpy(data, &vnet, head);
    return rarely() ? below((uint32_t)size + 1) : size;
}

ssize_t __wrap_read(int descriptor, void *data, size_t room);
ssize_t __wrap_read(int descriptor, void *data, size_t room)
{
    size_t size;
    check(descriptor == TUN, "a read of something else");
    if (!goes_on())
        return -1;
    ASAN_UNPOISON_MEMORY_REGION(data, room);
    if (!calm && rarely())
        return fail(below(2) ? EAGAIN : EINTR);
    size = make_read(data, room);
    ASAN_POISON_MEMORY_REGION((uint8_t *)data + size, room - size);
    given++;
    return (ssize_t)size;
}

static void say_size(struct msghdr *header, int size)
{
    struct cmsghdr *control = CMSG_FIRSTHDR(header);
    control->cmsg_level = IPPROTO_UDP, control->cmsg_type = RECEIVED, control->cmsg_len = CMSG_LEN(sizeof size);
    memcpy(CMSG_DATA(control), &size, sizeof size);
    header->msg_controllen = control->cmsg_len;
}

/* One datagram, or several of one size. */
static size_t make_datagrams(struct msghdr *header, uint8_t *data, size_t room)
{
    size_t size = make_data(data, room), all = size;
    bool sound = below(2);
    header->msg_controllen = below(8) ? 0 : header->msg_controllen;
    header->msg_flags = rarely() ? MSG_TRUNC : 0;
    if (header->msg_controllen && rarely()) {
        say_size(header, (int)any());
    } else if (header->msg_controllen) {
        say_size(header, (int)size);
        for (uint32_t more = below(90); size && more && all + size <= room; more--) {
            uint8_t *next = data + all;
            memcpy(next, data, size);
            if (size >= 40 && (sound || !rarely())) { /* the next segment, if it is one of TCP */
                put16(next + 22, (uint16_t)(ports > 3 ? below(ports) : get16(next + 22)));
                put32(next + 24, sequence), sequence += (uint32_t)size - 40;
                next[20 + TCP_FLAGS] |= rarely() && !sound ? FLAG_PSH : 0;
                put_l4_checksum(next, 20, size, TCP.checksum);
            }
            all += sound || !rarely() ? size : below((uint32_t)size);
        }
    } else {
        header->msg_controllen = 0;
    }
    return all;
}

int __wrap_recvmmsg(int descriptor, struct mmsghdr *messages, unsigned most, int flags, struct timespec *timeout);
int __wrap_recvmmsg(int descriptor, struct mmsghdr *messages, unsigned most, int flags, struct timespec *timeout)
{
    unsigned got = 1 + below(most);
    check(descriptor == WIRE && flags == MSG_DONTWAIT && !timeout, "a strange recvmmsg");
    if (!goes_on())
        return -1;
    if (!calm && rarely())
        return fail(below(2) ? EAGAIN : EINTR);
    for (unsigned i = 0; i < got; i++) {
        struct iovec *part = messages[i].msg_hdr.msg_iov;
        ASAN_UNPOISON_MEMORY_REGION(part->iov_base, part->iov_len);
        ((struct sockaddr_in *)messages[i].msg_hdr.msg_name)->sin_addr.s_addr = htonl(PEER + rarely());
        messages[i].msg_len = (unsigned)make_datagrams(&messages[i].msg_hdr, part->iov_base, part->iov_len);
        size_t size = messages[i].msg_len;
        ASAN_POISON_MEMORY_REGION((uint8_t *)part->iov_base + size, part->iov_len - size);
    }
    given += got;
    return (int)got;
}

/* ---- What goes ---- */

static uint8_t out[1 << 17];

/* Read every byte of it. */
static size_t gather(const struct iovec *parts, size_t count)
{
    size_t size = 0;
    for (size_t i = 0; i < count; i++) {
        check(size + parts[i].iov_len <= sizeof out, "too much at once");
        memcpy(out + size, parts[i].iov_base, parts[i].iov_len);
        size += parts[i].iov_len;
    }
    return size;
}

static const int refusals[] = {EAGAIN, EINTR, EMSGSIZE, EINVAL, EPERM, EIO};

static void check_message(const struct msghdr *header)
{
    size_t size = gather(header->msg_iov, header->msg_iovlen), segment = size;
    const struct sockaddr_in *to = header->msg_name;
    struct cmsghdr *control = CMSG_FIRSTHDR(header);
    check(ntohl(to->sin_addr.s_addr) - PEER < 6 && ntohs(to->sin_port) == 8285, "a message to nobody");
    if (control) {
        uint16_t value;
        check(control->cmsg_level == IPPROTO_UDP && control->cmsg_type == CONTROL, "a strange control message");
        memcpy(&value, CMSG_DATA(control), sizeof value);
        segment = value;
        check(features & 4 && size <= 65507, "segments that no kernel takes");
    }
    check(segment && (size + segment - 1) / segment <= 64, "too many segments");
    for (size_t at = 0; at < size; at += segment) {
        size_t length = smaller(segment, size - at);
        check(packet_length(out + at, length) == length, "a datagram that is no packet");
        check(out[at + IPV4_TTL] != 0, "a packet without a TTL");
    }
}

ssize_t __wrap_sendmsg(int descriptor, const struct msghdr *header, int flags);
ssize_t __wrap_sendmsg(int descriptor, const struct msghdr *header, int flags)
{
    check(descriptor == WIRE && flags == MSG_DONTWAIT && !header->msg_control, "a strange sendmsg");
    check_message(header);
    return rarely() ? fail(refusals[below(6)]) : 1;
}

int __wrap_sendmmsg(int descriptor, struct mmsghdr *messages, unsigned count, int flags);
int __wrap_sendmmsg(int descriptor, struct mmsghdr *messages, unsigned count, int flags)
{
    check(descriptor == WIRE && count && flags == MSG_DONTWAIT, "a strange sendmmsg");
    if (rarely())
        return fail(refusals[below(6)]);
    count = 1 + below(count);
    for (unsigned i = 0; i < count; i++)
        check_message(&messages[i].msg_hdr);
    return (int)count;
}

static void check_many(const struct vnet_header *vnet, const uint8_t *ip, size_t length)
{
    const struct transport *transport = ip[IPV4_PROTOCOL] == IPPROTO_TCP ? &TCP : &UDP;
    size_t payload = length - vnet->header_length;
    check(vnet->gso_type == transport->gso_type && vnet->flags == NEEDS_CHECKSUM, "another kind of packet");
    check(transport == &TCP || features & 2, "UDP that was not to become one");
    check(vnet->checksum_start == 20 && vnet->checksum_offset == transport->checksum, "a checksum elsewhere");
    check(vnet->gso_size && payload > vnet->gso_size && payload <= 64u * vnet->gso_size, "a strange size");
    check(fold(add(0, ip, 20)) == 0xffff, "a wrong header checksum");
    check(transport == &TCP || get16(ip + 24) == length - 20, "a wrong UDP length");
    uint16_t begun;
    memcpy(&begun, ip + 20 + transport->checksum, 2);
    check(begun == fold(pseudo_header(ip, length - 20)), "a checksum that is not rightly begun");
}

static void check_packet(size_t size)
{
    struct vnet_header vnet = {0};
    size_t head = features & 1 ? sizeof vnet : 0;
    check(size >= head, "less than a vnet header");
    memcpy(&vnet, out, head);
    check(packet_length(out + head, size - head) == size - head, "no packet");
    check(out[head + IPV4_TTL] != 0, "a packet without a TTL");
    if (vnet.gso_type)
        check_many(&vnet, out + head, size - head);
}

ssize_t __wrap_writev(int descriptor, const struct iovec *parts, int count);
ssize_t __wrap_writev(int descriptor, const struct iovec *parts, int count)
{
    size_t size = gather(parts, (size_t)count);
    check(descriptor == TUN, "a packet for something else");
    check_packet(size);
    return rarely() ? fail(below(2) ? EAGAIN : below(2) ? EINTR : EINVAL) : (ssize_t)size;
}

/* The pump's own answers: these, and what wakes it up. */
ssize_t __real_write(int descriptor, const void *data, size_t size);
ssize_t __wrap_write(int descriptor, const void *data, size_t size);
ssize_t __wrap_write(int descriptor, const void *data, size_t size)
{
    if (descriptor != TUN)
        return __real_write(descriptor, data, size);
    memcpy(out, data, size);
    check_packet(size);
    return (ssize_t)size;
}

int __wrap_poll(struct pollfd *descriptors, nfds_t count, int timeout);
int __wrap_poll(struct pollfd *descriptors, nfds_t count, int timeout)
{
    check(count == 2 && timeout == -1, "a strange poll");
    descriptors[0].revents = descriptors[0].events;
    return 1;
}

int __wrap_setsockopt(int descriptor, int level, int option, const void *value, socklen_t size);
int __wrap_setsockopt(int descriptor, int level, int option, const void *value, socklen_t size)
{
    check(descriptor == WIRE && level == IPPROTO_IP && option == IP_MTU_DISCOVER, "an option");
    check(value && size == sizeof(int), "an option's value");
    return 0;
}

int __wrap_getsockopt(int descriptor, int level, int option, void *value, socklen_t *size);
int __wrap_getsockopt(int descriptor, int level, int option, void *value, socklen_t *size)
{
    check(descriptor == WIRE && level == IPPROTO_IP && option == IP_MTU_DISCOVER && *size == 4, "an option");
    memcpy(value, &(int){IP_PMTUDISC_WANT}, 4);
    return 0;
}

/* ---- The cases ---- */

static void run_case(void)
{
    state = seed * 0x2545f4914f6cdd1du + number;
    features = below(16), left = ROUND, sequence = any();
    ports = below(3) ? 3 : 100, large = below(4) == 0, calm = below(2);
    pump = udp_pump_new(TUN, WIRE, 0x0a050100, 8285, features);
    check(pump != NULL, "no memory");
    for (uint32_t peer = 0; peer < 5; peer++) {
        for (uint32_t times = 1 + below(3); times; times--)
            udp_pump_set_peer(pump, 0x0a050200 + 64 * peer, 26 + below(7), PEER + below(6));
        if (below(4) == 0)
            udp_pump_drop_peer(pump, 0x0a050200 + 64 * below(5), 26 + below(7));
    }
    check((below(2) ? udp_pump_from_tun : udp_pump_from_wire)(pump) == 0, "a loop that fails");
    udp_pump_free(pump);
}

int main(int count, char **arguments)
{
    time_t end;
    if (count < 3)
        return 2;
    seed = strtoul(arguments[1], NULL, 10);
    end = time(NULL) + atoi(arguments[2]);
    if (count > 3) {
        number = strtoul(arguments[3], NULL, 10);
        run_case();
        return 0;
    }
    for (; time(NULL) < end; number++)
        run_case();
    printf("seed %lu: %lu cases, %lu packets\n", seed, number, given);
    return 0;
}
