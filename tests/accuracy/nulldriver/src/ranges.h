/* A set of memory ranges, by address: what was handed out and not yet given back.
 *
 * A linear search from the end is enough: the allocator above holds at most some thousand
 * ranges, and frees the young ones most often. The caller holds a lock.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct range {
    uintptr_t start;
    size_t size_bytes;
};
struct ranges {
    struct range *entries;
    size_t count, room;
};

static inline void add_range(struct ranges *ranges, uintptr_t start, size_t size_bytes) {
    if (ranges->count == ranges->room) {
        ranges->room = ranges->room ? 2 * ranges->room : 1024;
        ranges->entries = realloc(ranges->entries, ranges->room * sizeof *ranges->entries);
        if (!ranges->entries) abort();
    }
    ranges->entries[ranges->count++] = (struct range){start, size_bytes};
}

/* Take out the range that begins at an address. Returns whether there is one. */
static inline int remove_range(struct ranges *ranges, uintptr_t start, size_t *size_bytes) {
    for (size_t i = ranges->count; i-- > 0;) {
        if (ranges->entries[i].start != start) continue;
        *size_bytes = ranges->entries[i].size_bytes;
        ranges->entries[i] = ranges->entries[--ranges->count];
        return 1;
    }
    return 0;
}

static inline int lies_in_a_range(const struct ranges *ranges, uintptr_t address) {
    for (size_t i = ranges->count; i-- > 0;)
        if (address - ranges->entries[i].start < ranges->entries[i].size_bytes) return 1;
    return 0;
}
