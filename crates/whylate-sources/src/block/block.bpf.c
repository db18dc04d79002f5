// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Latency of I/O requests: submitted -> allocated (throttling, no free request) -> issued to the device -> completed.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "lost.bpf.h"
#include "pid_namespace.bpf.h"
#include "ways.bpf.h"
#include "distribution.bpf.h"
#include "settings.bpf.h"
#include "interrupts.bpf.h"
#include "requests.bpf.h"
#include "series.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Always empty: puts the types that user space shares into the skeleton. */
struct {
	struct done_request done_request;
	struct kept_request kept_request;
	struct block_key block_key;
	enum lost_reason lost_reason;
	enum request_flag request_flag;
	enum signaled_by signaled_by;
	enum operation operation;
	enum request_limits request_limits;
	enum series_limits series_limits;
	enum distribution_kind distribution_kind;
} layouts = {};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} late_requests SEC(".maps");

/* Number of requests completed on each CPU; user space sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, u64);
} count_by_cpu SEC(".maps");

static __always_inline bool is_wanted(const struct gendisk *disk)
{
	return !wanted_device || (disk && wanted_device == number_of_disk(disk));
}

/* Every bio passes here once, after limits of cgroups. */
SEC("tp_btf/block_bio_queue")
int BPF_PROG(on_block_bio_queue, struct bio *bio)
{
	u64 now_ns;

	if (!enabled || (wanted_device && !is_wanted(bio->bi_bdev->bd_disk)))
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (has_bio_devices && !bio->bi_bdev->bd_queue->mq_ops) {
		if (sees_throttling)
			held_is_released((u64)bio, now_ns);
		bio_starts(bio, now_ns);
		return 0;
	}
	bio_arrives((u64)bio, now_ns);
	if (sees_throttling)
		held_is_released((u64)bio, now_ns);
	return 0;
}

/* The front part of a bio that is too large becomes a bio of its own, which has no other event before its request. */
SEC("tp_btf/block_split")
int BPF_PROG(on_block_split, struct bio *part)
{
	u64 bio = (u64)part->bi_private, now_ns, arrival_ns;

	part = untrusted(struct bio, part);
	if (!enabled || (wanted_device && !is_wanted(part->bi_bdev->bd_disk)))
		return 0;
	/* A split by device mapper is not chained to the original bio: bi_private is the submitter's. */
	if (has_bio_devices && !part->bi_bdev->bd_queue->mq_ops)
		return 0;
	now_ns = bpf_ktime_get_ns();
	arrival_ns = bio_arrival_ns(bio, now_ns, false);
	bio_arrives((u64)part, arrival_ns ? arrival_ns : now_ns);
	if (sees_throttling)
		held_is_split((u64)part, bio);
	return 0;
}

/* io.max limits have no event where they hold a bio back, but this function returns true. Not called without limits. */
SEC("?fexit/__blk_throtl_bio")
int BPF_PROG(on_throttle_exit, struct bio *bio, bool is_held)
{
	if (enabled && is_held && (!wanted_device || is_wanted(bio->bi_bdev->bd_disk)))
		bio_is_held((u64)bio);
	return 0;
}

static __always_inline void bio_is_merged(u64 bio)
{
	if (sees_throttling)
		held_is_merged(bio);
	if (has_bio_devices)
		above_is_merged(bio);
}

SEC("?tp_btf/block_bio_backmerge")
int BPF_PROG(on_block_bio_backmerge, struct bio *bio)
{
	bio_is_merged((u64)bio);
	return 0;
}

SEC("?tp_btf/block_bio_frontmerge")
int BPF_PROG(on_block_bio_frontmerge, struct bio *bio)
{
	bio_is_merged((u64)bio);
	return 0;
}

/* Since 6.5; in the submitting thread. */
SEC("?tp_btf/block_io_start")
int BPF_PROG(on_block_io_start, struct request *request)
{
	struct read_first first;

	if (!enabled)
		return 0;
	first = read_first(request, bpf_get_current_task_btf());
	if (!wanted_device || wanted_device == first.device)
		request_starts(request, &first, false);
	return 0;
}

/* Before 6.5, in the submitting thread: a request with a flush has no event until it is issued, if ever. */
SEC("?tp_btf/block_getrq")
int BPF_PROG(on_block_getrq, struct bio *bio)
{
	u64 now_ns, arrival_ns;

	if (!enabled || !has_flush(bio->bi_opf) || (wanted_device && !is_wanted(bio->bi_bdev->bd_disk)))
		return 0;
	now_ns = bpf_ktime_get_ns();
	arrival_ns = bio_arrival_ns((u64)bio, now_ns, true);
	bio_starts_at(bio, arrival_ns ? arrival_ns : now_ns, 0);
	return 0;
}

/* The start of a request that its program sees after branches. */
static __always_inline void late_request_starts(const struct request *request, bool is_issued)
{
	const struct task_struct *task = bpf_get_current_task_btf();
	struct read_first first = read_first(untrusted(struct request, request), untrusted(struct task_struct, task));

	request_starts(request, &first, is_issued);
}

/* Replaces on_block_io_start(), together with on_block_rq_issue(): fires for requests that are not issued directly. */
SEC("?tp_btf/block_rq_insert")
int BPF_PROG(on_block_rq_insert, struct request *request)
{
	struct block_request *tracked;
	struct request_set *set;
	u32 slot;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	slot = slot_of_request(request, &set);
	tracked = slot == NO_SLOT ? NULL : request_in(slot);
	/* If it was issued and not requeued, the completion of an earlier request was not seen. */
	if (!tracked || tracked->issued_ns)
		late_request_starts(request, false);
	return 0;
}

SEC("tp_btf/block_rq_issue")
int BPF_PROG(on_block_rq_issue, struct request *request)
{
	struct block_request *tracked;
	struct request_set *set;
	u32 slot;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	slot = slot_of_request(request, &set);
	tracked = slot == NO_SLOT ? NULL : request_in(slot);
	/* If it was issued and not requeued, an earlier completion was not seen; not so if each start of a request is seen. */
	if (starts_by_bio || is_of_block_layer(request)) {
		if (!tracked || tracked->issued_ns) {
			late_request_starts(request, true);
			return 0;
		}
	} else if (!tracked) {
		/* The request started before measurement. The issuing thread is not its submitter. */
		return 0;
	}
	tracked->issued_ns = bpf_ktime_get_ns();
	/* Size with all merged bios. A flush may be empty by now, and a retried request partly done. */
	if (request->__data_len > tracked->facts.bytes) {
		tracked->facts.bytes = request->__data_len;
		tracked->facts.sector = request->__sector;
	}
	return 0;
}

/* The device was busy, or the request is retried: it is queued until it is issued again. */
SEC("tp_btf/block_rq_requeue")
int BPF_PROG(on_block_rq_requeue, struct request *request)
{
	struct block_request *tracked;
	struct request_set *set;
	u32 slot;

	if (!enabled)
		return 0;
	slot = slot_of_request(request, &set);
	tracked = slot == NO_SLOT ? NULL : request_in(slot);
	if (tracked)
		tracked->issued_ns = 0;
	return 0;
}

/* The request's bios were merged into the request before it, which continues; this one has no further event. */
SEC("tp_btf/block_rq_merge")
int BPF_PROG(on_block_rq_merge, struct request *request)
{
	struct request_set *set;
	u32 slot;

	if (!enabled)
		return 0;
	slot = slot_of_request(request, &set);
	if (slot != NO_SLOT && set)
		forget(set, slot);
	return 0;
}

struct end {
	u64 signaled_ns;
	u64 now_ns;
	enum signaled_by signaled_by;
	s32 error;
};

/* Sets when the completion was signaled: not before the request was issued. */
static __always_inline void set_signaled(struct end *end, const struct block_request *request)
{
	struct at_interrupt *at = own_interrupt();
	u64 signaled_ns = 0;

	end->signaled_ns = end->now_ns;
	end->signaled_by = SIGNALED_BY_NONE;
	if (!at)
		return;
	signaled_ns = at->since_ns ? at->since_ns : is_in_softirq(at) ? at->signaled_ns : 0;
	if (signaled_ns > request->issued_ns && signaled_ns < end->now_ns) {
		end->signaled_ns = signaled_ns;
		end->signaled_by = at->since_ns ? SIGNALED_BY_INTERRUPT : SIGNALED_BY_SOFTIRQ;
	}
}

static __always_inline void fill(struct done_request *done, const struct block_request *request, const struct end *end)
{
	done->request = *request;
	done->signaled_ns = end->signaled_ns;
	done->completed_ns = end->now_ns;
	done->error = end->error;
	done->cpu = bpf_get_smp_processor_id();
	done->signaled_by = end->signaled_by;
	done->unused = 0;
}

static __always_inline void keep_done_request(const struct block_request *request, const struct end *end)
{
	u32 cpu = bpf_get_smp_processor_id(), index;
	u64 *count = bpf_map_lookup_elem(&count_by_cpu, &cpu), position;
	const struct request_facts *facts = &request->facts;
	struct kept_request *kept;

	/* There is an element for each CPU. */
	if (!count)
		return;
	position = __sync_fetch_and_add(count, 1);
	index = cpu * done_by_cpu + (position & (done_by_cpu - 1));
	kept = bpf_map_lookup_elem(&done_by_position, &index);
	if (!kept)
		return;
	store_in_order(&kept->position, ~position);
	kept->request = request->request;
	kept->issued_ns = request->issued_ns;
	kept->signaled_ns = end->signaled_ns;
	kept->completed_ns = end->now_ns;
	kept->cgroup = facts->cgroup;
	kept->handler = facts->handler;
	kept->device = facts->device;
	kept->tid = facts->tid;
	kept->pid = facts->pid;
	kept->flags = facts->flags;
	kept->operation = facts->operation;
	kept->is_of_block_layer = request->is_of_block_layer;
	__builtin_memcpy(kept->comm, facts->comm, sizeof(kept->comm));
	store_in_order(&kept->position, position);
}

static __always_inline void report(const struct block_request *request, const struct end *end)
{
	struct done_request *late = bpf_ringbuf_reserve(&late_requests, sizeof(*late), 0);

	if (!late) {
		lose(LOST_LATE_EVENTS);
		return;
	}
	fill(late, request, end);
	bpf_ringbuf_submit(late, 0);
}

/* Completes a request. One of the excluded process counts only as a competitor, as does the block layer's own flush. */
static __always_inline void request_completes(struct request_set *set, u32 slot, struct block_request *tracked, s32 error)
{
	struct end end = { .now_ns = bpf_ktime_get_ns(), .error = error };

	/* A request that only flushes is not issued itself: the block layer's own flush is. */
	if (!tracked->issued_ns) {
		tracked->facts.flags |= FLAG_NOT_ISSUED;
		tracked->issued_ns = tracked->allocated_ns;
	}
	set_signaled(&end, tracked);
	if (keep_done)
		keep_done_request(tracked, &end);
	if (own_process && tracked->facts.pid == own_process) {
		lose(LOST_OWN);
	} else if (!tracked->is_of_block_layer) {
		count_done(tracked, end.signaled_ns, end.now_ns, error);
		if (late_over_ns && since(end.now_ns, tracked->submitted_ns) >= late_over_ns)
			report(tracked, &end);
	}
	forget(set, slot);
}

/* A driver that ends a request with the last of its parts (multipath) ends it again when nothing is left of it. */
static __always_inline bool is_empty(const struct request *request, u32 bytes)
{
	return !bytes && !untrusted(struct request, request)->bio && !is_command(request) && !has_flush(request->cmd_flags);
}

/* Fires for each completed part, before waiters are woken. `error` is a blk_status_t. */
SEC("tp_btf/block_rq_complete")
int BPF_PROG(on_block_rq_complete, struct request *request, int error, unsigned int bytes)
{
	struct block_request *tracked;
	struct request_set *set;
	u32 slot;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	slot = slot_of_request(request, &set);
	tracked = slot == NO_SLOT ? NULL : request_in(slot);
	if (!is_last_part(request, tracked ? tracked->has_flush : has_flush(request->cmd_flags), bytes))
		return 0;
	if (tracked)
		request_completes(set, slot, tracked, (u8)error);
	else if (!is_of_block_layer(request) && !is_empty(request, bytes))
		lose(LOST_UNMATCHED);
	return 0;
}

/*
 * Completion on bio-based devices. Bios of request-based devices pass here too, and some of the others: a driver may have
 * remapped the bio to the device below (multipath). A part that a driver has split off (md) ends before its parent bio.
 */
SEC("?tp_btf/block_bio_complete")
int BPF_PROG(on_block_bio_complete, struct request_queue *queue, struct bio *bio)
{
	struct block_request *tracked;
	struct request_set *set;
	u32 slot;

	if (!enabled)
		return 0;
	slot = slot_of((u64)bio, &set);
	tracked = slot == NO_SLOT ? NULL : request_in(slot);
	/* Before 6.5, a request with a flush is tracked by its bio, and its request completes too. */
	if (tracked && !(starts_by_bio && queue->mq_ops))
		request_completes(set, slot, tracked, bio->bi_status);
	else if (!tracked && !queue->mq_ops && is_wanted(queue->disk) && slot_of((u64)bio->bi_private, &set) == NO_SLOT)
		lose(LOST_UNMATCHED);
	return 0;
}
