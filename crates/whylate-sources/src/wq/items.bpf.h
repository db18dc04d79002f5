/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The work items that are queued, by address. */
#pragma once

enum item_limits {
	ITEM_SET_BITS = 14,
	ITEM_SETS = 1 << ITEM_SET_BITS,
};

/* A queued item older than this gives way when its set is full: it was most likely cancelled. */
#define EVICTABLE_NS 10000000000ULL

/* 64 bytes: one cache line. */
struct queued_item {
	u64 queued_ns;
	/* 0 when the item was activated while it was queued, as nearly all are. */
	u64 activated_ns;
	/* The handler, to recognise memory that was freed and reused without a cancellation that we could see. */
	u64 handler;
	/* 0, or when the item was queued before, if it was queued twice without a start in between. */
	u64 earlier_ns;
	u64 workqueue;
	u32 series;
	/* It was queued twice by mod_delayed_work(): it waits since the first time. */
	bool moved;
	/* Its worker is a softirq. */
	bool is_bh;
} __attribute__((aligned(64)));

/*
 * Everything about one item happens in an order that the kernel enforces: it is queued by whoever set its PENDING bit, under the
 * lock of the pool, and a worker takes it under that lock. So one address is never inserted by two CPUs at once.
 */
struct queued_set {
	u64 items_by_way[WAYS];
	/* How many items have their home here but stand in their second set. */
	u32 spilled;
	struct queued_item items[WAYS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ITEM_SETS);
	__type(key, u32);
	__type(value, struct queued_set);
} queued_items SEC(".maps");

/* Where an item is or can be put: way == WAYS when there is none. */
struct item_place {
	struct queued_set *set;
	u32 set_index;
	u32 way;
	/* Where the item spilled from, or NULL. */
	struct queued_set *home;
};

static __always_inline struct item_place home_of(u64 item)
{
	struct item_place place = { .set_index = hash_of(low_half(item), ITEM_SET_BITS), .way = WAYS };

	place.set = bpf_map_lookup_elem(&queued_items, &place.set_index);
	return place;
}

/* The second set of an item whose home is full. */
static __always_inline void go_to_second_set(struct item_place *place, u64 item)
{
	place->home = place->set;
	place->set_index = other_hash_of(low_half(item), ITEM_SET_BITS);
	place->set = bpf_map_lookup_elem(&queued_items, &place->set_index);
}

static __always_inline struct item_place find_item(u64 item)
{
	struct item_place place = home_of(item);

	if (!place.set)
		return place;
	place.way = way_of(place.set->items_by_way, item);
	if (place.way == WAYS && place.set->spilled) {
		go_to_second_set(&place, item);
		if (place.set)
			place.way = way_of(place.set->items_by_way, item);
	}
	return place;
}

static __always_inline struct queued_item *item_at(struct item_place *place)
{
	if (!place->set || place->way >= WAYS)
		return NULL;
	return &place->set->items[place->way];
}

/* The oldest item of a full set gives way if it is old enough to have been cancelled. */
static __noinline u32 evict_from(struct queued_set *set, u64 item, u64 now_ns)
{
	u32 oldest = WAYS;
	u64 oldest_ns = now_ns - EVICTABLE_NS;
	u64 owner;

#pragma unroll
	for (u32 way = 0; way < WAYS; way++) {
		if (set->items[way].queued_ns < oldest_ns) {
			oldest_ns = set->items[way].queued_ns;
			oldest = way;
		}
	}
	if (oldest >= WAYS)
		return WAYS;
	owner = set->items_by_way[oldest];
	if (__sync_val_compare_and_swap(&set->items_by_way[oldest], owner, item) != owner)
		return WAYS;
	lose(LOST_EVICTED);
	return oldest;
}

static __always_inline struct item_place claim_item(u64 item, u64 now_ns)
{
	struct item_place place = home_of(item);

	if (!place.set)
		return place;
	place.way = claim_way(place.set->items_by_way, item);
	if (place.way < WAYS)
		return place;
	go_to_second_set(&place, item);
	if (place.set)
		place.way = claim_way(place.set->items_by_way, item);
	if (place.way < WAYS) {
		__sync_fetch_and_add(&place.home->spilled, 1);
		return place;
	}
	place = home_of(item);
	if (place.set)
		place.way = evict_from(place.set, item, now_ns);
	if (place.way >= WAYS)
		lose(LOST_ITEMS_FULL);
	return place;
}

static __always_inline void free_item(struct item_place *place)
{
	if (!place->set || place->way >= WAYS)
		return;
	place->set->items_by_way[place->way] = 0;
	if (place->home)
		__sync_fetch_and_add(&place->home->spilled, -1);
}
