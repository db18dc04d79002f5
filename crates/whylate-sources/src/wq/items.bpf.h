/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The work items that are queued, by address, in plain BPF arrays. A hash map costs more than all the rest: it hashes with jhash, takes a
 * bucket lock, and moves elements to and from a free list. And most of what is left is cache misses, so a set is one cache line, and the
 * home sets are few enough to stay in the cache; what has no room there goes to a large second table.
 *
 * Everything about one item happens in an order that the kernel enforces: it is queued by whoever set its PENDING bit, under the lock of the
 * pool, and a worker takes it under that lock. So one address is never inserted by two CPUs at once, and an entry is never read before it
 * is written.
 */
#pragma once

enum item_limits {
	SET_ITEMS = 2,
	HOME_SET_BITS = 11,
	HOME_SETS = 1 << HOME_SET_BITS,
	SPILL_SET_BITS = 16,
	SPILL_SETS = 1 << SPILL_SET_BITS,
	/* How many sets of the second table an item may stand in. */
	SPILL_PROBES = 8,
};

/* A queued item older than this gives way when there is no room: it was most likely cancelled. */
#define EVICTABLE_NS 10000000000ULL

enum queued_flags {
	/* Its worker is a softirq. */
	ITEM_IS_BH = 1 << 0,
	/* There is an entry in details_by_item. */
	ITEM_HAS_DETAILS = 1 << 1,
	/* It stands in the second table. */
	ITEM_IS_SPILLED = 1 << 2,
};

struct queued_item {
	/* The address, 0 for a free entry. */
	u64 item;
	/* 0 from the moment in which the entry becomes free until its next owner has written it: nobody may evict that one. */
	u64 queued_ns;
	/*
	 * Half of the handler's address, which is all of it within the kernel's text: recognises memory that was freed and reused without
	 * a cancellation that we could see.
	 */
	u32 handler;
	u16 series;
	u16 flags;
};

/* One cache line. */
struct queued_set {
	struct queued_item items[SET_ITEMS];
	/* In home sets: how many items stand in the second table instead. */
	u32 spilled;
	u32 _unused[3];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HOME_SETS);
	__type(key, u32);
	__type(value, struct queued_set);
} queued_items SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SPILL_SETS);
	__type(key, u32);
	__type(value, struct queued_set);
} spilled_items SEC(".maps");

/* What few items have. */
struct item_details {
	/* 0, or when max_active let it in; an item that was not held back has none. */
	u64 activated_ns;
	/* 0, or when the item was queued before, if it was queued twice without a start in between. */
	u64 earlier_ns;
	/* It was queued twice by mod_delayed_work(): it waits since the first time. */
	bool moved;
	/* The rest is kept where late events are asked for. */
	u64 workqueue;
	u32 tid;
	u32 pid;
	/* Kernel stack of whoever queued it, negative without one. */
	s32 stack;
	char comm[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	/* User space makes it larger where late events are asked for. */
	__uint(max_entries, 8192);
	__type(key, u64);
	__type(value, struct item_details);
} details_by_item SEC(".maps");

static __always_inline struct queued_set *home_of(u64 item)
{
	u32 index = hash_of(low_half(item), HOME_SET_BITS);

	return bpf_map_lookup_elem(&queued_items, &index);
}

static __always_inline struct queued_set *spill_set(u64 item, u32 probe)
{
	u32 index = (other_hash_of(low_half(item), SPILL_SET_BITS) + probe) % SPILL_SETS;

	return bpf_map_lookup_elem(&spilled_items, &index);
}

static __always_inline struct queued_item *item_in(struct queued_set *set, u64 item)
{
	if (set->items[0].item == item)
		return &set->items[0];
	if (set->items[1].item == item)
		return &set->items[1];
	return NULL;
}

static __always_inline struct queued_item *claim_in(struct queued_set *set, u64 item)
{
	if (!set->items[0].item && !__sync_val_compare_and_swap(&set->items[0].item, 0, item))
		return &set->items[0];
	if (!set->items[1].item && !__sync_val_compare_and_swap(&set->items[1].item, 0, item))
		return &set->items[1];
	return NULL;
}

static __noinline struct queued_item *find_spilled(u64 item)
{
	for (u32 probe = 0; probe < SPILL_PROBES; probe++) {
		struct queued_set *set = spill_set(item, probe);
		struct queued_item *queued = set ? item_in(set, item) : NULL;

		if (queued)
			return queued;
	}
	return NULL;
}

/* The entry of an item that is queued already, or NULL. */
static __always_inline struct queued_item *find_item(struct queued_set *home, u64 item)
{
	struct queued_item *queued = item_in(home, item);

	if (!queued && home->spilled)
		queued = find_spilled(item);
	return queued;
}

static __always_inline void forget_details(const struct queued_item *queued, u64 item)
{
	if (queued->flags & ITEM_HAS_DETAILS)
		bpf_map_delete_elem(&details_by_item, &item);
}

static __always_inline void free_item(struct queued_set *home, struct queued_item *queued, u64 item)
{
	forget_details(queued, item);
	if (queued->flags & ITEM_IS_SPILLED)
		__sync_fetch_and_add(&home->spilled, -1);
	queued->queued_ns = 0;
	barrier();
	queued->item = 0;
}

/* Takes over an entry that is so old that its item was most likely cancelled. */
static __always_inline struct queued_item *evict_in(struct queued_set *set, u64 item, u64 now_ns)
{
#pragma unroll
	for (u32 i = 0; i < SET_ITEMS; i++) {
		struct queued_item *old = &set->items[i];
		u64 owner = old->item;
		u64 queued_ns = old->queued_ns;
		struct queued_set *home;

		if (!owner || !queued_ns || (s64)(now_ns - queued_ns) < (s64)EVICTABLE_NS)
			continue;
		/* Whoever takes the stamp takes the entry, unless its item starts just now. */
		if (__sync_val_compare_and_swap(&old->queued_ns, queued_ns, 0) != queued_ns)
			continue;
		if (__sync_val_compare_and_swap(&old->item, owner, item) != owner)
			continue;
		forget_details(old, owner);
		home = home_of(owner);
		if (home && old->flags & ITEM_IS_SPILLED)
			__sync_fetch_and_add(&home->spilled, -1);
		old->flags = 0;
		lose(LOST_EVICTED);
		return old;
	}
	return NULL;
}

/* An entry where the home set has none free. */
static __noinline struct queued_item *spill(struct queued_set *home, u64 item, u64 now_ns)
{
	struct queued_item *queued = evict_in(home, item, now_ns);

	if (queued)
		return queued;
	for (u32 probe = 0; probe < SPILL_PROBES && !queued; probe++) {
		struct queued_set *set = spill_set(item, probe);

		if (!set)
			break;
		queued = claim_in(set, item);
		if (!queued)
			queued = evict_in(set, item, now_ns);
	}
	if (!queued) {
		lose(LOST_ITEMS_FULL);
		return NULL;
	}
	queued->flags = ITEM_IS_SPILLED;
	__sync_fetch_and_add(&home->spilled, 1);
	return queued;
}

static __always_inline struct queued_item *claim_item(struct queued_set *home, u64 item, u64 now_ns)
{
	struct queued_item *queued = claim_in(home, item);

	if (!queued)
		return spill(home, item, now_ns);
	queued->flags = 0;
	return queued;
}

static __always_inline struct item_details *details_of(const struct queued_item *queued, u64 item)
{
	if (!(queued->flags & ITEM_HAS_DETAILS))
		return NULL;
	return bpf_map_lookup_elem(&details_by_item, &item);
}

/* The details of an item that may have none yet; NULL when there is no room. */
static __noinline struct item_details *make_details(struct queued_item *queued, u64 item)
{
	struct item_details none = {};

	if (!(queued->flags & ITEM_HAS_DETAILS)) {
		if (bpf_map_update_elem(&details_by_item, &item, &none, BPF_ANY)) {
			lose(LOST_DETAILS_FULL);
			return NULL;
		}
		queued->flags |= ITEM_HAS_DETAILS;
	}
	return bpf_map_lookup_elem(&details_by_item, &item);
}
