/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Distributions per handler and workqueue, or per CPU or pool, found by a key of two words; the ID of a series is the
 * position of its key, or without a key the CPU number.
 */
#pragma once

enum series_limits {
	SERIES_GROUP_BITS = 10,
	SERIES_GROUPS = 1 << SERIES_GROUP_BITS,
	/* Four slots of two words fill a cache line. */
	SERIES_GROUP_SIZE = 4,
	MAX_SERIES = SERIES_GROUPS * SERIES_GROUP_SIZE,
	/* Maximum distance of a key from its home, in groups. */
	SERIES_PROBES = 16,
	SERIES_NONE = MAX_SERIES,
	/* Less than the RCU grace period after which a workqueue's memory is freed. */
	WORKQUEUE_CHECK_NS = 1000000,
};

/*
 * Only what cannot be derived is counted, so that the common item costs two counters: one that max_active did not hold
 * back has `activate` 0 and `pool` equal to `latency`; one with a worker that was never switched out has `on_cpu` equal to
 * `runtime`.
 */
enum distribution_kind {
	LATENCY_OF_IMMEDIATE,
	LATENCY_OF_DEFERRED,
	ACTIVATE_OF_DEFERRED,
	POOL_OF_DEFERRED,
	RUNTIME_OF_STEADY,
	RUNTIME_OF_SWITCHED,
	ON_CPU_OF_SWITCHED,
	ASLEEP_OF_SWITCHED,
	READY_OF_SWITCHED,
	DISTRIBUTION_KINDS,
};

enum series_use {
	/* Not in use: user space skips it. */
	SERIES_UNUSED,
	SERIES_COUNTS,
	/* The handler is the selected one. */
	SERIES_IS_WANTED,
	/* It is not. */
	SERIES_IS_UNWANTED,
};

enum key_mark {
	SLOT_FREE = 0,
	/* Being written. */
	SLOT_CLAIMED = 1,
	/* The workqueue was destroyed: no more items arrive, and another workqueue may get its address. */
	SLOT_RETIRED = 2,
	/* First word of keys without a handler. */
	KEY_NO_HANDLER = 3,
	/* Second word of the entries that record whether a handler is selected. */
	KEY_IS_FILTER = 4,
	/* Added to CPU and pool numbers in the second word; addresses are larger. */
	KEY_FIRST_NUMBER = 16,
};

struct series {
	/* enum series_use */
	u32 use;
	s32 pool_id;
	/* -1 for pools that are not bound to a CPU. */
	s32 pool_cpu;
	s32 pool_nice;
	bool pool_is_bh;
	u32 cpu;
	/* When the workqueue's name was last compared. */
	u64 checked_ns;
	/* "function" or "function [module]", as the kernel's %ps prints it: it stays valid after the module is unloaded. */
	char handler[SYMBOL_LENGTH];
	char workqueue[WORKQUEUE_NAME_LENGTH];
	struct distribution distributions[DISTRIBUTION_KINDS];
};

struct series_slot {
	u64 handler;
	u64 place;
};

struct series_group {
	struct series_slot slots[SERIES_GROUP_SIZE];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SERIES_GROUPS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct series_group);
} series_index SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERIES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct series);
} series_by_id SEC(".maps");

static __always_inline u32 series_home(u64 handler, u64 place)
{
	return hash_of(low_half(handler) ^ (low_half(place) * 0x85EBCA6BU), SERIES_GROUP_BITS);
}

/* Series of the key if its home group has it, else SERIES_NONE. */
static __always_inline u32 known_series(u64 handler, u64 place)
{
	u32 home = series_home(handler, place);
	struct series_group *group = bpf_map_lookup_elem(&series_index, &home);

	if (!group)
		return SERIES_NONE;
#pragma unroll
	for (u32 slot = 0; slot < SERIES_GROUP_SIZE; slot++) {
		if (group->slots[slot].handler == handler && group->slots[slot].place == place)
			return home * SERIES_GROUP_SIZE + slot;
	}
	return SERIES_NONE;
}

/* Searches all groups in which the key may be. */
static __noinline u32 search_series(u64 handler, u64 place)
{
	u32 home = series_home(handler, place);

	for (u32 probe = 0; probe < SERIES_PROBES; probe++) {
		u32 index = (home + probe) % SERIES_GROUPS;
		struct series_group *group = bpf_map_lookup_elem(&series_index, &index);

		if (!group)
			return SERIES_NONE;
#pragma unroll
		for (u32 slot = 0; slot < SERIES_GROUP_SIZE; slot++) {
			if (group->slots[slot].handler == handler && group->slots[slot].place == place)
				return index * SERIES_GROUP_SIZE + slot;
		}
	}
	return SERIES_NONE;
}

/*
 * Claims a free slot, which user space ignores before publish_series(). Two CPUs may claim two slots for one key
 * concurrently; the later one keeps few counts, and user space merges series with equal labels.
 */
static __noinline u32 claim_series(u64 handler, u64 place)
{
	u32 home = series_home(handler, place);

	for (u32 probe = 0; probe < SERIES_PROBES; probe++) {
		u32 index = (home + probe) % SERIES_GROUPS;
		struct series_group *group = bpf_map_lookup_elem(&series_index, &index);

		if (!group)
			return SERIES_NONE;
#pragma unroll
		for (u32 slot = 0; slot < SERIES_GROUP_SIZE; slot++) {
			u64 *owner = &group->slots[slot].handler;

			if (*owner == SLOT_FREE && __sync_val_compare_and_swap(owner, SLOT_FREE, SLOT_CLAIMED) == SLOT_FREE) {
				group->slots[slot].place = place;
				return index * SERIES_GROUP_SIZE + slot;
			}
		}
	}
	return SERIES_NONE;
}

/* Makes a claimed slot visible to searches. */
static __always_inline void publish_series(u32 id, u64 handler)
{
	u32 index = id / SERIES_GROUP_SIZE;
	struct series_group *group = bpf_map_lookup_elem(&series_index, &index);

	if (group)
		__sync_lock_test_and_set(&group->slots[id % SERIES_GROUP_SIZE].handler, handler);
}

/* Hides the series from items; its counts stay. */
static __always_inline void retire_series(u32 id)
{
	publish_series(id, SLOT_RETIRED);
}
