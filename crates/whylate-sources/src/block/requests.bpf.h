/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Requests in progress, found by their addresses: a set of seven in one cache line tells which slot has one. A request
 * has one owner at a time, from the thread that makes it to whoever ends it, so only taking a slot is a race.
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
	SLOTS_A_SET = 8,
	/* 28,672 requests; at a quarter of that, one in a hundred thousand finds its set full. */
	SLOTS = SETS * SLOTS_A_SET,
	NO_SLOT = SLOTS,
	BIO_BITS = 14,
	BIOS = 1 << BIO_BITS,
	/* include/linux/blk_types.h: from here on, requests are commands of drivers and programs, which are no I/O. */
	REQ_OP_DRV_IN = 34,
};

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
 * When bios came, which are not in a request yet: each has two places, of which it takes the one that was taken longest
 * ago. Most are empty again at once; those stay that are merged into a request.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BIOS);
	__type(key, u32);
	__type(value, u64);
} moment_by_bio SEC(".maps");

/* Those that are done, for each CPU its own; user space makes it as long as all of them take. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct done_request);
} done_by_position SEC(".maps");

/* Of a bio that limits of its cgroup hold back, whose thread is not the one that hands it on. */
struct held_bio {
	u64 since_ns;
	/* 0: it is held still. */
	u64 let_go_ns;
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
	/* Of a word: whose it is. The rest are nanoseconds, which come round after 18 minutes. */
	TAG_BITS = 24,
	MOMENT_BITS = 64 - TAG_BITS,
};

/* What tells bios apart that share a word: objects of the kernel are aligned to 64 bytes and more. */
static __always_inline u64 tag_of(u32 low)
{
	return (u64)(low >> 6) << MOMENT_BITS;
}

#define MOMENT_MASK ((1ull << MOMENT_BITS) - 1)

static __always_inline u64 *moment_at(u32 index)
{
	return bpf_map_lookup_elem(&moment_by_bio, &index);
}

/* Since when it is there; longer than anything where nothing is. */
static __always_inline u64 age_of(u64 moment, u64 now_ns)
{
	return moment ? (now_ns - moment) & MOMENT_MASK : MOMENT_MASK;
}

static __always_inline void bio_comes(u64 bio, u64 now_ns)
{
	u32 low = low_half(bio);
	u64 *first = moment_at(hash_of(low, BIO_BITS)), *second = moment_at(other_hash_of(low, BIO_BITS));
	u64 moment = tag_of(low) | (now_ns & MOMENT_MASK);

	if (!first || !second)
		return;
	/* Of one that was merged, whose address this one has, nothing may stay in front of it. */
	if (!*first || (*first & ~MOMENT_MASK) == tag_of(low) || age_of(*first, now_ns) >= age_of(*second, now_ns))
		*first = moment;
	else
		*second = moment;
}

static __always_inline u64 *moment_of(u32 low)
{
	u64 *moment = moment_at(hash_of(low, BIO_BITS));

	if (moment && *moment && (*moment & ~MOMENT_MASK) == tag_of(low))
		return moment;
	moment = moment_at(other_hash_of(low, BIO_BITS));
	return moment && *moment && (*moment & ~MOMENT_MASK) == tag_of(low) ? moment : NULL;
}

/* When it came; 0 where that was not seen. */
static __always_inline u64 bio_came_ns(u64 bio, u64 now_ns, bool is_taken)
{
	u64 *moment = moment_of(low_half(bio)), ns;

	if (!moment)
		return 0;
	ns = (now_ns - *moment) & MOMENT_MASK;
	if (is_taken)
		*moment = 0;
	/* The clocks of two CPUs may be apart a little. */
	return ns > MOMENT_MASK / 2 ? now_ns : now_ns - ns;
}

/* The slot that has the request, else NO_SLOT. */
static __always_inline u32 slot_of(u64 request, struct request_set **set)
{
	u32 index = hash_of(low_half(request), SET_BITS), way;

	*set = bpf_map_lookup_elem(&set_by_hash, &index);
	if (!*set)
		return NO_SLOT;
	way = way_of((*set)->requests, request);
	return way == WAYS ? NO_SLOT : index * SLOTS_A_SET + way;
}

static __always_inline u32 take_slot(u64 request, struct request_set *set)
{
	u32 way = claim_way(set->requests, request);

	return way == WAYS ? NO_SLOT : hash_of(low_half(request), SET_BITS) * SLOTS_A_SET + way;
}

static __always_inline struct block_request *request_in(u32 slot)
{
	return bpf_map_lookup_elem(&request_by_slot, &slot);
}

static __always_inline void forget(struct request_set *set, u32 slot)
{
	struct block_request *begun = request_in(slot);

	if (begun)
		store_word_in_order(&begun->request, 0);
	for (u32 way = 0; way < WAYS; way++) {
		if (way == (slot & (SLOTS_A_SET - 1)))
			store_word_in_order(&set->requests[way], 0);
	}
}

static __always_inline enum operation operation_of(u32 flags, u32 bytes)
{
	switch (flags & REQ_OP_MASK) {
	case REQ_OP_READ:
		return READS;
	case REQ_OP_WRITE:
		/* Empty, for the flush before it. */
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
 * A hash of the name and the creation time of a process or thread: a later one with the same PID or TID differs, and so
 * does the same one under another name.
 */
static __always_inline u32 identity_of(const struct task_struct *task, const char *comm)
{
	u64 words[COMM_LENGTH / 8];

	__builtin_memcpy(words, comm, sizeof(words));
	return ((words[0] * 0x9E3779B97F4A7C15ull ^ words[1]) * 0xC2B2AE3D27D4EB4Full ^ task->start_time) * 0x9E3779B97F4A7C15ull >> 32;
}

/* Whether an interrupt runs: also by its events, as not every kernel gives programs the preemption count. */
static __always_inline bool is_interrupted(const struct task_struct *task)
{
	const struct at_interrupt *at = own_interrupt();

	return (at && (at->since_ns || is_in_softirq(at))) || interrupts_here(task);
}

/* The one that runs submits it. */
static __always_inline void describe_submitter(struct request_facts *facts)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (!wants_submitters) {
		facts->pid = own_process ? shown_process(task) : 0;
		/* Of requests, only those of this process are told apart. */
		if (own_process && facts->pid == own_process && is_interrupted(task))
			facts->pid = 0;
		return;
	}
	if (is_interrupted(task)) {
		/* The interrupted thread has nothing to do with it. */
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
		const struct task_struct *leader = task->group_leader;

		bpf_probe_read_kernel(facts->process, sizeof(facts->process), leader->comm);
		facts->identity = identity_of(leader, facts->process);
	}
}

static __always_inline void describe(struct request_facts *facts, const struct request *request)
{
	if (late_over_ns) {
		facts->sector = request->__sector;
		facts->flags = flags_of(request->cmd_flags);
	}
	facts->bytes = request->__data_len;
	facts->operation = operation_of(request->cmd_flags, request->__data_len);
	facts->device = device_of(request);
	facts->cgroup = late_over_ns || series_key == BY_CGROUP ? cgroup_of_bio(request->bio) : 0;
	describe_submitter(facts);
}

static __always_inline void describe_bio(struct request_facts *facts, const struct bio *bio)
{
	facts->sector = bio->bi_iter.bi_sector;
	facts->bytes = bio->bi_iter.bi_size;
	facts->flags = flags_of(bio->bi_opf);
	facts->operation = operation_of(bio->bi_opf, bio->bi_iter.bi_size);
	facts->device = number_of_disk(bio->bi_bdev->bd_disk);
	facts->cgroup = late_over_ns || series_key == BY_CGROUP ? cgroup_of_bio(bio) : 0;
	describe_submitter(facts);
}

/* A bio that limits hold back now. */
static __always_inline void bio_is_held(u64 bio)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct held_bio held = {
		.since_ns = bpf_ktime_get_ns(),
	};

	if (!is_interrupted(task)) {
		held.handler = own_handler(task);
		held.tid = shown_number(task);
		held.pid = shown_process(task);
		bpf_get_current_comm(held.comm, sizeof(held.comm));
		bpf_probe_read_kernel(held.process, sizeof(held.process), task->group_leader->comm);
		if (series_key == BY_THREAD)
			held.identity = identity_of(task, held.comm);
		else if (series_key == BY_PROCESS)
			held.identity = identity_of(task->group_leader, held.process);
	}
	if (bpf_map_update_elem(&held_by_bio, &bio, &held, BPF_ANY))
		lose(LOST_HELD_FULL);
}

/* It has become a part of somebody else's request. */
static __always_inline void held_is_merged(u64 bio)
{
	bpf_map_delete_elem(&held_by_bio, &bio);
}

/* A part of it is submitted on its own. */
static __always_inline void held_is_split(u64 part, u64 bio)
{
	struct held_bio *held = bpf_map_lookup_elem(&held_by_bio, &bio);

	if (held && bpf_map_update_elem(&held_by_bio, &part, held, BPF_ANY))
		lose(LOST_HELD_FULL);
}

/* One that goes on: it was held, or has the address of one that was, and went on before in somebody else's request. */
static __always_inline void held_goes_on(u64 bio, u64 now_ns)
{
	struct held_bio *held = bpf_map_lookup_elem(&held_by_bio, &bio);

	if (!held)
		return;
	if (held->let_go_ns)
		bpf_map_delete_elem(&held_by_bio, &bio);
	else
		held->let_go_ns = now_ns;
}

/* Whoever had it submitted before limits held it, and when. */
static __always_inline void take_held(struct block_request *begun, u64 bio)
{
	struct held_bio *held = bpf_map_lookup_elem(&held_by_bio, &bio);

	if (!held)
		return;
	/* What is left of one that was split is held once more, and has no event when it is let go. */
	if (held->since_ns <= begun->made_ns) {
		begun->submitted_ns = held->since_ns;
		begun->let_go_ns = held->let_go_ns ? held->let_go_ns : begun->made_ns;
		begun->facts.handler = held->handler;
		begun->facts.tid = held->tid;
		begun->facts.pid = held->pid;
		begun->facts.identity = held->identity;
		__builtin_memcpy(begun->facts.comm, held->comm, sizeof(held->comm));
		__builtin_memcpy(begun->facts.process, held->process, sizeof(held->process));
	}
	bpf_map_delete_elem(&held_by_bio, &bio);
}

/* Room for one that begins. What began before at the same address and was not seen ending is lost. */
static __always_inline struct block_request *room_for(u64 address)
{
	struct request_set *set;
	u32 slot = slot_of(address, &set);
	struct block_request *begun;

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
	begun = request_in(slot);
	/* User space may be reading. */
	if (begun)
		store_word_in_order(&begun->request, 1);
	return begun;
}

/*
 * A driver without requests may hand a bio on as it is to a device that has them (NVMe's paths). It is this request from
 * then on, since it came to the device above, and may have no other end.
 */
static __always_inline void take_from_above(struct block_request *begun, u64 bio)
{
	struct request_set *set;
	u32 slot = slot_of(bio, &set);
	struct block_request *above = slot == NO_SLOT ? NULL : request_in(slot);

	if (!above || !set)
		return;
	begun->submitted_ns = above->submitted_ns;
	forget(set, slot);
}

/* The same of one that becomes a part of a request that is there. */
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

/* The block layer's own, for the flushes of one or more that were submitted. */
static __always_inline bool is_of_block_layer(const struct request *request)
{
	return (request->cmd_flags & REQ_OP_MASK) == REQ_OP_FLUSH && !request->bio;
}

static __always_inline void request_begins(const struct request *request, bool is_issued)
{
	struct block_request *begun = room_for((u64)request);
	const struct bio *bio = request->bio;
	u64 now_ns;

	if (!begun)
		return;
	now_ns = bpf_ktime_get_ns();
	describe(&begun->facts, request);
	begun->made_ns = now_ns;
	begun->submitted_ns = 0;
	begun->let_go_ns = 0;
	begun->issued_ns = is_issued ? now_ns : 0;
	begun->is_of_block_layer = is_of_block_layer(request);
	begun->has_flush = has_flush(request->cmd_flags);
	if (bio && !is_command(request)) {
		begun->submitted_ns = bio_came_ns((u64)bio, now_ns, true);
		if (has_bio_devices)
			take_from_above(begun, (u64)bio);
		if (tells_limits)
			take_held(begun, (u64)bio);
		if (!begun->submitted_ns)
			lose(LOST_SUBMISSION);
	}
	if (!begun->submitted_ns)
		begun->submitted_ns = now_ns;
	store_word_in_order(&begun->request, (u64)request);
}

static __always_inline void bio_begins_at(const struct bio *bio, u64 now_ns, u64 issued_ns)
{
	struct block_request *begun = room_for((u64)bio);

	if (!begun)
		return;
	describe_bio(&begun->facts, bio);
	begun->submitted_ns = now_ns;
	begun->made_ns = now_ns;
	begun->let_go_ns = 0;
	begun->issued_ns = issued_ns;
	begun->is_of_block_layer = false;
	begun->has_flush = has_flush(bio->bi_opf);
	if (tells_limits)
		take_held(begun, (u64)bio);
	store_word_in_order(&begun->request, (u64)bio);
}

/* Its driver has it at once, and hands parts of it to devices below, or does it itself. */
static __always_inline void bio_begins(const struct bio *bio, u64 now_ns)
{
	bio_begins_at(bio, now_ns, now_ns);
}

/* The slot of a request, found by its address or, where only its bio was seen as yet, by that of its bio. */
static __always_inline u32 slot_of_request(const struct request *request, struct request_set **set)
{
	u32 slot = slot_of((u64)request, set);

	if (slot != NO_SLOT || !begins_by_bio || !request->bio)
		return slot;
	return slot_of((u64)request->bio, set);
}
