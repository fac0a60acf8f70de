/* The peers, which come and go while both loops look for them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "pump.h"

static size_t position(const struct table *table, uint64_t key)
{
    size_t low = 0, high = table->used;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->entries[middle].key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct entry *find(const struct table *table, uint64_t key)
{
    size_t at = position(table, key);
    return at < table->used && table->entries[at].key == key ? &table->entries[at] : NULL;
}

/* The entry of a key, made with the value 0 if there is none; NULL when memory is short. */
static struct entry *find_or_add(struct table *table, uint64_t key)
{
    size_t at = position(table, key);
    if (at < table->used && table->entries[at].key == key)
        return &table->entries[at];
    if (table->used == table->room) {
        size_t room = table->room ? 2 * table->room : 16;
        struct entry *entries = realloc(table->entries, room * sizeof *entries);
        if (!entries)
            return NULL;
        table->entries = entries, table->room = room;
    }
    memmove(&table->entries[at + 1], &table->entries[at], (table->used++ - at) * sizeof *table->entries);
    table->entries[at] = (struct entry){.key = key};
    return &table->entries[at];
}

static void erase(struct table *table, struct entry *entry)
{
    size_t after = (size_t)(table->entries + table->used-- - (entry + 1));
    memmove(entry, entry + 1, after * sizeof *entry);
}

static uint64_t subnet_key(uint32_t address, unsigned length)
{
    uint32_t mask = length ? ~(uint32_t)0 << (32 - length) : 0;
    return (uint64_t)length << 32 | (address & mask);
}

static void forget_endpoint(struct pump *pump, uint32_t address)
{
    struct entry *endpoint = find(&pump->endpoints, address);
    if (endpoint && --endpoint->value == 0)
        erase(&pump->endpoints, endpoint);
}

static int set_peer(struct pump *pump, uint64_t key, uint32_t address)
{
    size_t before = pump->subnets.used;
    struct entry *endpoint = find_or_add(&pump->endpoints, address), *subnet;
    if (!endpoint)
        return ENOMEM;
    endpoint->value++;
    subnet = find_or_add(&pump->subnets, key);
    if (!subnet) {
        forget_endpoint(pump, address);
        return ENOMEM;
    }
    if (pump->subnets.used > before)
        pump->lengths[key >> 32]++;
    else
        forget_endpoint(pump, subnet->value);
    subnet->value = address;
    return 0;
}

bool find_route(struct pump *pump, uint32_t destination, uint32_t *endpoint)
{
    const struct entry *found = NULL;
    pthread_rwlock_rdlock(&pump->lock);
    for (unsigned length = 33; !found && length-- > 0;)
        if (pump->lengths[length])
            found = find(&pump->subnets, subnet_key(destination, length));
    if (found)
        *endpoint = found->value;
    pthread_rwlock_unlock(&pump->lock);
    return found != NULL;
}

bool accepts(struct pump *pump, uint32_t source)
{
    bool known;
    if (pump->features & ACCEPT_ANY)
        return true;
    pthread_rwlock_rdlock(&pump->lock);
    known = find(&pump->endpoints, source) != NULL;
    pthread_rwlock_unlock(&pump->lock);
    return known;
}

/* 0, or ENOMEM. */
EXPORT int udp_pump_set_peer(struct pump *pump, uint32_t network, unsigned length, uint32_t endpoint)
{
    pthread_rwlock_wrlock(&pump->lock);
    int error = set_peer(pump, subnet_key(network, length), endpoint);
    pthread_rwlock_unlock(&pump->lock);
    return error;
}

EXPORT void udp_pump_drop_peer(struct pump *pump, uint32_t network, unsigned length)
{
    pthread_rwlock_wrlock(&pump->lock);
    struct entry *subnet = find(&pump->subnets, subnet_key(network, length));
    if (subnet) {
        forget_endpoint(pump, subnet->value);
        pump->lengths[length]--;
        erase(&pump->subnets, subnet);
    }
    pthread_rwlock_unlock(&pump->lock);
}
