/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The queued work items, by address, in plain BPF arrays. A hash map costs more than all the rest: jhash, a bucket
 * lock, elements moved to and from a free list. Most of what is left is cache misses: a set is one cache line, and the
 * home sets are few enough to stay in the cache; items without room there go to a large second table.
 *
 * Writers of an entry: the thread that set an item's PENDING bit queues it, so its queue events are serialized; so are
 * its starts, as it does not run twice at a time. But if starts are seen at a tracepoint, a queueing may race with the
 * start of the one before. They synchronize in one word, the stamp, which is changed by compare-and-exchange:
 *
 *   0             the entry is free, or idle: its item is not queued, and any item may claim the entry
 *   STAMP_BUSY    the entry is being written
 *   even          when the item was queued
 *   odd           as above, and its history holds an earlier queueing without a start
 */
#pragma once

enum item_limits {
	SET_ITEMS = 2,
	HOME_SET_BITS = 12,
	HOME_SETS = 1 << HOME_SET_BITS,
	/* 32,768 items; the tables take 90 bytes for each. */
	SPILL_SET_BITS = 14,
	SPILL_SETS = 1 << SPILL_SET_BITS,
	/* Number of sets of the second table in which an item may be. */
	SPILL_PROBES = 8,
	FIRST_SPILLED = HOME_SETS * SET_ITEMS,
	ENTRIES = FIRST_SPILLED + SPILL_SETS * SET_ITEMS,
	NO_ENTRY = ENTRIES,
};

enum {
	STAMP_BUSY = 1,
	/* The last bit of the clock is cleared, so that half of the stamps are a nanosecond early. */
	STAMP_HAS_EARLIER = 1,
};

/* A queued item older than this is evicted if there is no room: it was most likely cancelled. */
#define EVICTABLE_NS 10000000000ULL

/* mod_delayed_work() on an item that seems to be queued for longer than this may have found it cancelled. */
#define MOVE_WITHIN_NS 1000000000ULL

enum queued_flags {
	/* Its worker is a softirq. */
	ITEM_IS_BH = 1 << 0,
	/* max_active held it back; its history has the time of its activation. */
	ITEM_WAS_DEFERRED = 1 << 1,
};

struct queued_item {
	u64 item;
	u64 stamp;
	/* Half of the handler's address (all of it in kernel text): detects reused memory without a visible cancellation. */
	u32 handler;
	u16 series;
	u16 flags;
};

/* One cache line. */
struct queued_set {
	struct queued_item items[SET_ITEMS];
	/* In home sets: number of their items in the second table. */
	u32 spilled;
	u32 _unused[3];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HOME_SETS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct queued_set);
} queued_items SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SPILL_SETS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct queued_set);
} spilled_items SEC(".maps");

/* Fields that few items need. */
struct item_history {
	/* When max_active admitted it; with ITEM_WAS_DEFERRED. */
	u64 activated_ns;
	/* When the item was queued before; with STAMP_HAS_EARLIER. */
	u64 earlier_ns;
	/* mod_delayed_work() requeued it: it waits since the first time. */
	bool moved;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ENTRIES);
	__type(key, u32);
	__type(value, struct item_history);
} history_by_entry SEC(".maps");

/* Home set of an item. */
struct home {
	struct queued_set *set;
	u32 index;
};

static __always_inline struct home home_of(u64 item)
{
	struct home home = { .index = hash_of(low_half(item), HOME_SET_BITS) };

	home.set = bpf_map_lookup_elem(&queued_items, &home.index);
	return home;
}

static __always_inline u32 spill_index(u64 item, u32 probe)
{
	return (other_hash_of(low_half(item), SPILL_SET_BITS) + probe) % SPILL_SETS;
}

/* Entry by index; home entries come first. */
static __noinline struct queued_item *entry_at(u32 entry)
{
	struct queued_set *set;
	u32 index;

	if (entry < FIRST_SPILLED) {
		index = entry / SET_ITEMS;
		set = bpf_map_lookup_elem(&queued_items, &index);
		if (!set)
			return NULL;
		return entry % SET_ITEMS ? &set->items[1] : &set->items[0];
	}
	index = (entry - FIRST_SPILLED) / SET_ITEMS;
	set = bpf_map_lookup_elem(&spilled_items, &index);
	if (!set)
		return NULL;
	return entry % SET_ITEMS ? &set->items[1] : &set->items[0];
}

/* Index of the item's entry in the second table, or NO_ENTRY. */
static __noinline u32 find_spilled(u64 item)
{
	for (u32 probe = 0; probe < SPILL_PROBES; probe++) {
		u32 index = spill_index(item, probe);
		struct queued_set *set = bpf_map_lookup_elem(&spilled_items, &index);

		if (!set)
			break;
		if (set->items[0].item == item)
			return FIRST_SPILLED + index * SET_ITEMS;
		if (set->items[1].item == item)
			return FIRST_SPILLED + index * SET_ITEMS + 1;
	}
	return NO_ENTRY;
}

/* Entry of the item, queued or idle, and its index; NULL if there is none. */
static __always_inline struct queued_item *find_item(const struct home *home, u64 item, u32 *entry)
{
	if (!home->set)
		return NULL;
	*entry = home->index * SET_ITEMS;
	if (home->set->items[0].item == item)
		return &home->set->items[0];
	*entry += 1;
	if (home->set->items[1].item == item)
		return &home->set->items[1];
	if (!home->set->spilled)
		return NULL;
	*entry = find_spilled(item);
	return *entry < NO_ENTRY ? entry_at(*entry) : NULL;
}

/* Claims a free or idle entry for writing. */
static __always_inline bool claim(struct queued_item *queued, u64 item)
{
	if (queued->stamp || __sync_val_compare_and_swap(&queued->stamp, 0, STAMP_BUSY))
		return false;
	queued->item = item;
	return true;
}

static __always_inline void count_out_spilled(u64 item)
{
	struct home home = home_of(item);

	if (home.set)
		__sync_fetch_and_add(&home.set->spilled, -1);
}

/* Claims an entry that is so old that its item was most likely cancelled. */
static __always_inline bool evict(struct queued_item *queued, u64 item, u64 now_ns, bool spilled)
{
	u64 stamp = queued->stamp;

	if (stamp <= STAMP_BUSY || (s64)(now_ns - stamp) < (s64)EVICTABLE_NS)
		return false;
	if (__sync_val_compare_and_swap(&queued->stamp, stamp, STAMP_BUSY) != stamp)
		return false;
	if (spilled)
		count_out_spilled(queued->item);
	queued->item = item;
	lose(LOST_EVICTED);
	return true;
}

/* Claims an entry if the home set has none free. */
static __noinline u32 claim_spilled(struct queued_set *home, u32 home_index, u64 item, u64 now_ns)
{
	if (evict(&home->items[0], item, now_ns, false))
		return home_index * SET_ITEMS;
	if (evict(&home->items[1], item, now_ns, false))
		return home_index * SET_ITEMS + 1;
	for (u32 probe = 0; probe < SPILL_PROBES; probe++) {
		u32 index = spill_index(item, probe);
		struct queued_set *set = bpf_map_lookup_elem(&spilled_items, &index);

		if (!set)
			break;
#pragma unroll
		for (u32 i = 0; i < SET_ITEMS; i++) {
			struct queued_item *queued = &set->items[i];

			if (claim(queued, item) || evict(queued, item, now_ns, true)) {
				__sync_fetch_and_add(&home->spilled, 1);
				return FIRST_SPILLED + index * SET_ITEMS + i;
			}
		}
	}
	lose(LOST_ITEMS_FULL);
	return NO_ENTRY;
}

/* Claims an entry for an item that has none, and returns its index; NULL if there is no room. */
static __always_inline struct queued_item *claim_item(const struct home *home, u64 item, u64 now_ns, u32 *entry)
{
	if (!home->set)
		return NULL;
	*entry = home->index * SET_ITEMS;
	if (claim(&home->set->items[0], item))
		return &home->set->items[0];
	*entry += 1;
	if (claim(&home->set->items[1], item))
		return &home->set->items[1];
	*entry = claim_spilled(home->set, home->index, item, now_ns);
	return *entry < NO_ENTRY ? entry_at(*entry) : NULL;
}

/*
 * A start takes the entry with the stamp that it has seen: false if the item was requeued concurrently. A home entry stays
 * idle for the item's next time; one of the second table is freed, so that no lookup has to go there.
 */
static __always_inline bool take_item(struct queued_item *queued, u32 entry, u64 item, u64 stamp)
{
	bool spilled = entry >= FIRST_SPILLED;

	if (__sync_val_compare_and_swap(&queued->stamp, stamp, spilled ? STAMP_BUSY : 0) != stamp)
		return false;
	if (spilled) {
		queued->item = 0;
		count_out_spilled(item);
		__sync_lock_test_and_set(&queued->stamp, 0);
	}
	return true;
}
