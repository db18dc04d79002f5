/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Requests in progress, by address: a set of seven addresses in one cache line has an index of the slots. A request has
 * one owner at a time, from the thread that allocates it to its completion, so only claiming a slot is racy.
 */
#pragma once

#include "context.bpf.h"
#include "disks.bpf.h"
#include "registers.bpf.h"
#include "settings.bpf.h"

enum request_limits {
	SET_BITS = 12,
	SETS = 1 << SET_BITS,
	SET_WAYS = WAYS,
	/* Of a set; a word for each, and one more, make a cache line. */
	SLOTS_PER_SET = 8,
	/* At most 28,672 requests; at a quarter of that, one in a hundred thousand finds its set full. */
	SLOTS = SETS * SLOTS_PER_SET,
	NO_SLOT = SLOTS,
	BIO_BITS = 14,
	BIOS = 1 << BIO_BITS,
	/* include/linux/blk_types.h: requests from here on are passthrough commands of drivers and programs, not I/O. */
	REQ_OP_DRV_IN = 34,
};

/* Log2 of the number of sets; user space reduces it if there are few CPUs. */
const volatile u32 set_bits = SET_BITS;

struct request_set {
	u64 requests[WAYS];
} __attribute__((aligned(64)));

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SETS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct request_set);
} set_by_hash SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct block_request);
} request_by_slot SEC(".maps");

/*
 * Arrival times of bios that are not in a request yet. A bio has two possible words, and takes the older one. Most are
 * free again at once; those of bios that are merged into a request remain.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BIOS);
	__type(key, u32);
	__type(value, u64);
} moment_by_bio SEC(".maps");

/* Rings of completed requests, one per CPU; user space sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct kept_request);
} done_by_position SEC(".maps");

/* A bio that limits of its cgroup hold back: the thread that releases it is not its submitter. */
struct held_bio {
	u64 since_ns;
	/* 0: still held back. */
	u64 released_ns;
	u64 handler;
	u32 tid;
	u32 pid;
	u32 identity;
	u32 unused;
	char comm[COMM_LENGTH];
	char process[COMM_LENGTH];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u64);
	__type(value, struct held_bio);
} held_by_bio SEC(".maps");

enum {
	/* Tag of the bio in a word. The rest are nanoseconds, which wrap after 18 minutes. */
	TAG_BITS = 24,
	STAMP_BITS = 64 - TAG_BITS,
};

/* Distinguishes bios that share a word: objects of the kernel are aligned to 64 bytes and more. */
static __always_inline u64 tag_of(u32 low)
{
	return (u64)(low >> 6) << STAMP_BITS;
}

#define STAMP_MASK ((1ull << STAMP_BITS) - 1)

static __always_inline u64 *stamp_at(u32 index)
{
	return bpf_map_lookup_elem(&moment_by_bio, &index);
}

/* Age of an arrival time; the maximum if there is none. */
static __always_inline u64 age_of(u64 stamp, u64 now_ns)
{
	return stamp ? (now_ns - stamp) & STAMP_MASK : STAMP_MASK;
}

static __always_inline void bio_arrives(u64 bio, u64 now_ns)
{
	u32 low = low_half(bio);
	u64 *first = stamp_at(hash_of(low, BIO_BITS)), *second = stamp_at(other_hash_of(low, BIO_BITS));
	u64 stamp = tag_of(low) | (now_ns & STAMP_MASK);

	if (!first || !second)
		return;
		/* A stale word of a merged bio with this address must not be found first. */
	if (!*first || (*first & ~STAMP_MASK) == tag_of(low) || age_of(*first, now_ns) >= age_of(*second, now_ns))
		*first = stamp;
	else
		*second = stamp;
}

static __always_inline u64 *stamp_of(u32 low)
{
	u64 *stamp = stamp_at(hash_of(low, BIO_BITS));

	if (stamp && *stamp && (*stamp & ~STAMP_MASK) == tag_of(low))
		return stamp;
	stamp = stamp_at(other_hash_of(low, BIO_BITS));
	return stamp && *stamp && (*stamp & ~STAMP_MASK) == tag_of(low) ? stamp : NULL;
}

/* Arrival time of a bio; 0 if it was not seen. */
static __always_inline u64 bio_arrival_ns(u64 bio, u64 now_ns, bool is_taken)
{
	u64 *stamp = stamp_of(low_half(bio)), ns;

	if (!stamp)
		return 0;
	ns = (now_ns - *stamp) & STAMP_MASK;
	if (is_taken)
		*stamp = 0;
	/* Clocks of two CPUs may differ slightly. */
	return ns > STAMP_MASK / 2 ? now_ns : now_ns - ns;
}

/* Slot of the request; NO_SLOT if it is not tracked. */
static __always_inline u32 slot_of(u64 request, struct request_set **set)
{
	u32 index = hash_of(low_half(request), set_bits), way;

	*set = bpf_map_lookup_elem(&set_by_hash, &index);
	if (!*set)
		return NO_SLOT;
	way = way_of((*set)->requests, request);
	return way == WAYS ? NO_SLOT : index * SLOTS_PER_SET + way;
}

static __always_inline u32 take_slot(u64 request, struct request_set *set)
{
	u32 way = claim_way(set->requests, request);

	return way == WAYS ? NO_SLOT : hash_of(low_half(request), set_bits) * SLOTS_PER_SET + way;
}

static __always_inline struct block_request *request_in(u32 slot)
{
	return bpf_map_lookup_elem(&request_by_slot, &slot);
}

static __always_inline void forget(struct request_set *set, u32 slot)
{
	struct block_request *tracked = request_in(slot);

	if (tracked)
		store_in_order(&tracked->request, 0);
	for (u32 way = 0; way < WAYS; way++) {
		if (way == (slot & (SLOTS_PER_SET - 1)))
			store_in_order(&set->requests[way], 0);
	}
}

static __always_inline enum operation operation_of(u32 flags, u32 bytes)
{
	switch (flags & REQ_OP_MASK) {
	case REQ_OP_READ:
		return READS;
	case REQ_OP_WRITE:
		/* Empty, for the sake of its flush. */
		return bytes ? WRITES : FLUSHES;
	case REQ_OP_FLUSH:
		return FLUSHES;
	case REQ_OP_DISCARD:
	case REQ_OP_SECURE_ERASE:
		return DISCARDS;
	default:
		return DOES_OTHER;
	}
}

static __always_inline u32 flag(u32 flags, u32 bit, enum request_flag flag)
{
	return flags & (1u << bit) ? flag : 0;
}

static __always_inline u32 flags_of(u32 flags)
{
	return flag(flags, bpf_core_enum_value(enum req_flag_bits, __REQ_PREFLUSH), FLAG_PREFLUSH) |
	       flag(flags, bpf_core_enum_value(enum req_flag_bits, __REQ_FUA), FLAG_FUA) |
	       flag(flags, bpf_core_enum_value(enum req_flag_bits, __REQ_RAHEAD), FLAG_AHEAD) |
	       flag(flags, bpf_core_enum_value(enum req_flag_bits, __REQ_SYNC), FLAG_SYNC) |
	       flag(flags, bpf_core_enum_value(enum req_flag_bits, __REQ_META), FLAG_META) |
	       flag(flags, bpf_core_enum_value(enum req_flag_bits, __REQ_IDLE), FLAG_IDLE);
}

static __always_inline u64 cgroup_of_bio(const struct bio *bio)
{
		/* CONFIG_BLK_CGROUP */
	if (!bpf_core_field_exists(bio->bi_blkg) || !bio || !bio->bi_blkg)
		return 0;
	return bio->bi_blkg->blkcg->css.cgroup->kn->id;
}

static __always_inline u64 own_handler(const struct task_struct *task)
{
	return task->flags & PF_WQ_WORKER ? handler_of_worker(task) : 0;
}

/*
 * A hash of comm and start time of a process or thread: distinguishes a later one with its PID or TID, and itself under
 * another comm.
 */
static __always_inline u32 identity_of(const struct task_struct *task, const char *comm)
{
	u64 words[COMM_LENGTH / 8];

	__builtin_memcpy(words, comm, sizeof(words));
	return ((words[0] * 0x9E3779B97F4A7C15ull ^ words[1]) * 0xC2B2AE3D27D4EB4Full ^ task->start_time) * 0x9E3779B97F4A7C15ull >> 32;
}

/*
 * Whether an interrupt is running, by the preemption count; also by its events, as not every kernel lets programs read that
 * count.
 */
static __always_inline bool is_interrupted(u32 interrupts)
{
	const struct at_interrupt *at = own_interrupt();

	return (at && (at->since_ns || is_in_softirq(at))) || interrupts;
}

/* What is read through pointers, before branches: see untrusted(). */
struct read_first {
	/* The first bio of the request, if any. */
	const struct bio *bio;
	u32 device;
	/* Of the preemption count, if submitters are wanted. */
	u32 interrupts;
};

static __always_inline u32 interrupts_of_submitter(const struct task_struct *task)
{
	return wants_submitters ? interrupts_here(task) : 0;
}

static __always_inline struct read_first read_first(const struct request *request, const struct task_struct *task)
{
	struct read_first first = { .bio = request->bio, .device = device_of(request), .interrupts = interrupts_of_submitter(task) };

	return first;
}

/* Sets the current thread as the submitter. */
static __always_inline void describe_submitter(struct request_facts *facts, u32 interrupts)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (!wants_submitters) {
		facts->pid = own_process ? shown_process(task) : 0;
		/* Requests of this process are only distinguished from all others. */
		if (own_process && facts->pid == own_process && is_interrupted(interrupts_here(untrusted(struct task_struct, task))))
			facts->pid = 0;
		return;
	}
	if (is_interrupted(interrupts)) {
		/* The interrupted thread is not the submitter. */
		facts->handler = 0;
		facts->tid = 0;
		facts->pid = 0;
		facts->identity = 0;
		__builtin_memset(facts->comm, 0, sizeof(facts->comm));
		__builtin_memset(facts->process, 0, sizeof(facts->process));
		return;
	}
	facts->tid = shown_number(task);
	facts->pid = shown_process(task);
	if (late_over_ns)
		facts->handler = own_handler(task);
	if (late_over_ns || series_key == BY_THREAD)
		bpf_get_current_comm(facts->comm, sizeof(facts->comm));
	if (series_key == BY_THREAD)
		facts->identity = identity_of(task, facts->comm);
	if (series_key == BY_PROCESS) {
		const struct task_struct *leader = untrusted(struct task_struct, task)->group_leader;

		bpf_probe_read_kernel(facts->process, sizeof(facts->process), leader->comm);
		facts->identity = identity_of(leader, facts->process);
	}
}

static __always_inline void describe(struct request_facts *facts, const struct request *request, const struct read_first *first)
{
	if (late_over_ns) {
		facts->sector = request->__sector;
		facts->flags = flags_of(request->cmd_flags);
	}
	facts->bytes = request->__data_len;
	facts->operation = operation_of(request->cmd_flags, request->__data_len);
	facts->device = first->device;
	facts->cgroup = late_over_ns || series_key == BY_CGROUP ? cgroup_of_bio(first->bio) : 0;
	describe_submitter(facts, first->interrupts);
}

static __always_inline void describe_bio(struct request_facts *facts, const struct bio *bio)
{
	facts->sector = bio->bi_iter.bi_sector;
	facts->bytes = bio->bi_iter.bi_size;
	facts->flags = flags_of(bio->bi_opf);
	facts->operation = operation_of(bio->bi_opf, bio->bi_iter.bi_size);
	facts->device = number_of_disk(bio->bi_bdev->bd_disk);
	facts->cgroup = late_over_ns || series_key == BY_CGROUP ? cgroup_of_bio(bio) : 0;
	describe_submitter(facts, interrupts_of_submitter(untrusted(struct task_struct, bpf_get_current_task_btf())));
}

/* Limits hold back a bio. */
static __always_inline void bio_is_held(u64 bio)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct held_bio held = {
		.since_ns = bpf_ktime_get_ns(),
	};
	const struct task_struct *leader;

	if (!is_interrupted(interrupts_here(untrusted(struct task_struct, task)))) {
		held.handler = own_handler(task);
		held.tid = shown_number(task);
		held.pid = shown_process(task);
		bpf_get_current_comm(held.comm, sizeof(held.comm));
		leader = untrusted(struct task_struct, task)->group_leader;
		bpf_probe_read_kernel(held.process, sizeof(held.process), leader->comm);
		if (series_key == BY_THREAD)
			held.identity = identity_of(task, held.comm);
		else if (series_key == BY_PROCESS)
			held.identity = identity_of(leader, held.process);
	}
	if (bpf_map_update_elem(&held_by_bio, &bio, &held, BPF_ANY))
		lose(LOST_HELD_FULL);
}

/* The bio was merged into another request. */
static __always_inline void held_is_merged(u64 bio)
{
	bpf_map_delete_elem(&held_by_bio, &bio);
}

/* A part of the bio is submitted on its own. */
static __always_inline void held_is_split(u64 part, u64 bio)
{
	struct held_bio *held = bpf_map_lookup_elem(&held_by_bio, &bio);

	if (held && bpf_map_update_elem(&held_by_bio, &part, held, BPF_ANY))
		lose(LOST_HELD_FULL);
}

/* The bio goes on: it was held back, or reuses the address of a held bio that was merged into another request. */
static __always_inline void held_is_released(u64 bio, u64 now_ns)
{
	struct held_bio *held = bpf_map_lookup_elem(&held_by_bio, &bio);

	if (!held)
		return;
	if (held->released_ns)
		bpf_map_delete_elem(&held_by_bio, &bio);
	else
		held->released_ns = now_ns;
}

/* Restores the submitter and submission time from before limits held the bio back. */
static __always_inline void take_held(struct block_request *tracked, u64 bio)
{
	struct held_bio *held = bpf_map_lookup_elem(&held_by_bio, &bio);

	if (!held)
		return;
	/* The rest of a bio that was split is held back again, and has no event when it is released. */
	if (held->since_ns <= tracked->allocated_ns) {
		tracked->submitted_ns = held->since_ns;
		tracked->released_ns = held->released_ns ? held->released_ns : tracked->allocated_ns;
		tracked->facts.handler = held->handler;
		tracked->facts.tid = held->tid;
		tracked->facts.pid = held->pid;
		tracked->facts.identity = held->identity;
		__builtin_memcpy(tracked->facts.comm, held->comm, sizeof(held->comm));
		__builtin_memcpy(tracked->facts.process, held->process, sizeof(held->process));
	}
	bpf_map_delete_elem(&held_by_bio, &bio);
}

/* Claims an entry for a new request. An earlier request at this address, of which no end was seen, is lost. */
static __always_inline struct block_request *room_for(u64 address)
{
	struct request_set *set;
	u32 slot = slot_of(address, &set);
	struct block_request *tracked;

	if (!set)
		return NULL;
	if (slot != NO_SLOT) {
		lose(LOST_REUSED);
	} else {
		slot = take_slot(address, set);
		if (slot == NO_SLOT) {
			lose(LOST_REQUESTS_FULL);
			return NULL;
		}
	}
	tracked = request_in(slot);
	/* User space may be reading it. */
	if (tracked)
		store_in_order(&tracked->request, 1);
	return tracked;
}

/*
 * A bio-based driver may pass a bio on as it is to a request-based device (NVMe multipath). From then on it is this
 * request, which was submitted when the bio arrived at the device above, and may have no end of its own.
 */
static __always_inline void take_from_above(struct block_request *tracked, u64 bio)
{
	struct request_set *set;
	u32 slot = slot_of(bio, &set);
	struct block_request *above = slot == NO_SLOT ? NULL : request_in(slot);

	if (!above || !set)
		return;
	tracked->submitted_ns = above->submitted_ns;
	forget(set, slot);
}

/* A bio that was passed on is merged into another request. */
static __always_inline void above_is_merged(u64 bio)
{
	struct request_set *set;
	u32 slot = slot_of(bio, &set);

	if (slot != NO_SLOT && set)
		forget(set, slot);
}

static __always_inline bool is_command(const struct request *request)
{
	return (request->cmd_flags & REQ_OP_MASK) >= REQ_OP_DRV_IN;
}

/* The block layer's own request, for the flushes of one or more submitted requests. */
static __always_inline bool is_of_block_layer(const struct request *request)
{
	return (request->cmd_flags & REQ_OP_MASK) == REQ_OP_FLUSH && !untrusted(struct request, request)->bio;
}

static __always_inline void request_starts(const struct request *request, const struct read_first *first, bool is_issued)
{
	struct block_request *tracked = room_for((u64)request);
	const struct bio *bio = first->bio;
	u64 now_ns;

	if (!tracked)
		return;
	now_ns = bpf_ktime_get_ns();
	describe(&tracked->facts, request, first);
	tracked->allocated_ns = now_ns;
	tracked->submitted_ns = 0;
	tracked->released_ns = 0;
	tracked->issued_ns = is_issued ? now_ns : 0;
	tracked->is_of_block_layer = is_of_block_layer(request);
	tracked->has_flush = has_flush(request->cmd_flags);
	if (bio && !is_command(request)) {
		tracked->submitted_ns = bio_arrival_ns((u64)bio, now_ns, true);
		if (has_bio_devices)
			take_from_above(tracked, (u64)bio);
		if (sees_throttling)
			take_held(tracked, (u64)bio);
		if (!tracked->submitted_ns)
			lose(LOST_SUBMISSION);
	}
	if (!tracked->submitted_ns)
		tracked->submitted_ns = now_ns;
	store_in_order(&tracked->request, (u64)request);
}

static __always_inline void bio_starts_at(const struct bio *bio, u64 now_ns, u64 issued_ns)
{
	struct block_request *tracked = room_for((u64)bio);

	if (!tracked)
		return;
	describe_bio(&tracked->facts, bio);
	tracked->submitted_ns = now_ns;
	tracked->allocated_ns = now_ns;
	tracked->released_ns = 0;
	tracked->issued_ns = issued_ns;
	tracked->is_of_block_layer = false;
	tracked->has_flush = has_flush(bio->bi_opf);
	if (sees_throttling)
		take_held(tracked, (u64)bio);
	store_in_order(&tracked->request, (u64)bio);
}

/* A bio-based driver gets the bio at once, and passes parts of it to devices below, or serves it itself. */
static __always_inline void bio_starts(const struct bio *bio, u64 now_ns)
{
	bio_starts_at(untrusted(struct bio, bio), now_ns, now_ns);
}

/* Slot of a request, by its address or, if only its bio was seen so far, by that of the bio. */
static __always_inline u32 slot_of_request(const struct request *request, struct request_set **set)
{
	u32 slot = slot_of((u64)request, set);

	if (slot != NO_SLOT || !starts_by_bio || !request->bio)
		return slot;
	return slot_of((u64)request->bio, set);
}
