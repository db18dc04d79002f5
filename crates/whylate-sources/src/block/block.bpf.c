// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How long I/O requests take: submitted -> made (throttling, no free request) -> issued to the device -> completed.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "pid_namespace.bpf.h"
#include "ways.bpf.h"
#include "distribution.bpf.h"
#include "settings.bpf.h"
#include "interrupts.bpf.h"
#include "requests.bpf.h"
#include "series.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Nothing is ever in it: it puts the types that user space shares into the skeleton. */
struct {
	struct done_request done_request;
	struct block_key block_key;
	enum lost_reason lost_reason;
	enum request_flag request_flag;
	enum told_by told_by;
	enum operation operation;
	enum request_limits request_limits;
	enum series_limits series_limits;
	enum distribution_kind distribution_kind;
} layouts = {};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} late_requests SEC(".maps");

/* Requests that were done on each CPU; user space makes room for each. */
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

/* Each bio passes here once, after limits of cgroups have let it pass. */
SEC("tp_btf/block_bio_queue")
int BPF_PROG(on_block_bio_queue, struct bio *bio)
{
	u64 now_ns;

	if (!enabled || (wanted_device && !is_wanted(bio->bi_bdev->bd_disk)))
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (has_bio_devices && !bio->bi_bdev->bd_queue->mq_ops) {
		if (tells_limits)
			held_goes_on((u64)bio, now_ns);
		bio_begins(bio, now_ns);
		return 0;
	}
	bio_comes((u64)bio, now_ns);
	if (tells_limits)
		held_goes_on((u64)bio, now_ns);
	return 0;
}

/* The part in front of one that is too large becomes a bio of its own, which has no other event before its request. */
SEC("tp_btf/block_split")
int BPF_PROG(on_block_split, struct bio *part)
{
	u64 bio = (u64)part->bi_private, now_ns, came_ns;

	if (!enabled || (wanted_device && !is_wanted(part->bi_bdev->bd_disk)))
		return 0;
	/* Device mapper's part has not become another bio's: what it points to is somebody else's. */
	if (has_bio_devices && !part->bi_bdev->bd_queue->mq_ops)
		return 0;
	now_ns = bpf_ktime_get_ns();
	came_ns = bio_came_ns(bio, now_ns, false);
	bio_comes((u64)part, came_ns ? came_ns : now_ns);
	if (tells_limits)
		held_is_split((u64)part, bio);
	return 0;
}

/* The one place where limits of a cgroup (io.max) hold a bio back has no event. It is not called without limits. */
SEC("?fexit/__blk_throtl_bio")
int BPF_PROG(on_throttle_exit, struct bio *bio, bool is_held)
{
	if (enabled && is_held && (!wanted_device || is_wanted(bio->bi_bdev->bd_disk)))
		bio_is_held((u64)bio);
	return 0;
}

static __always_inline void bio_is_merged(u64 bio)
{
	if (tells_limits)
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

/* 6.5; in the thread that submits it. */
SEC("?tp_btf/block_io_start")
int BPF_PROG(on_block_io_start, struct request *request)
{
	if (enabled && (!wanted_device || wanted_device == device_of(request)))
		request_begins(request, false);
	return 0;
}

/* Before 6.5, in the thread that submits it: one with a flush has no event until it is issued, if ever. */
SEC("?tp_btf/block_getrq")
int BPF_PROG(on_block_getrq, struct bio *bio)
{
	u64 now_ns, came_ns;

	if (!enabled || !has_flush(bio->bi_opf) || (wanted_device && !is_wanted(bio->bi_bdev->bd_disk)))
		return 0;
	now_ns = bpf_ktime_get_ns();
	came_ns = bio_came_ns((u64)bio, now_ns, true);
	bio_begins_at(bio, came_ns ? came_ns : now_ns, 0);
	return 0;
}

/* Stands in for on_block_io_start(), with on_block_rq_issue(): it comes for requests that are not issued at once. */
SEC("?tp_btf/block_rq_insert")
int BPF_PROG(on_block_rq_insert, struct request *request)
{
	struct block_request *begun;
	struct request_set *set;
	u32 slot;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	slot = slot_of_request(request, &set);
	begun = slot == NO_SLOT ? NULL : request_in(slot);
	/* What was issued and not requeued has ended unseen. */
	if (!begun || begun->issued_ns)
		request_begins(request, false);
	return 0;
}

SEC("tp_btf/block_rq_issue")
int BPF_PROG(on_block_rq_issue, struct request *request)
{
	struct block_request *begun;
	struct request_set *set;
	u32 slot;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	slot = slot_of_request(request, &set);
	begun = slot == NO_SLOT ? NULL : request_in(slot);
	/* What was issued and not requeued has ended unseen, but for those of which each begin is seen. */
	if (begins_by_bio || is_of_block_layer(request)) {
		if (!begun || begun->issued_ns) {
			request_begins(request, true);
			return 0;
		}
	} else if (!begun) {
		/* It began before measuring did. Whoever issues it has not submitted it. */
		return 0;
	}
	begun->issued_ns = bpf_ktime_get_ns();
	/* With all that has been merged into it; one that flushes may have been emptied, and one that is tried again be done in part. */
	if (request->__data_len > begun->facts.bytes) {
		begun->facts.bytes = request->__data_len;
		begun->facts.sector = request->__sector;
	}
	return 0;
}

/* Its device was busy, or it is tried again: it waits until it is issued once more. */
SEC("tp_btf/block_rq_requeue")
int BPF_PROG(on_block_rq_requeue, struct request *request)
{
	struct block_request *begun;
	struct request_set *set;
	u32 slot;

	if (!enabled)
		return 0;
	slot = slot_of_request(request, &set);
	begun = slot == NO_SLOT ? NULL : request_in(slot);
	if (begun)
		begun->issued_ns = 0;
	return 0;
}

/* Its bios have become those of the request before it: that one goes on with them, and this one is not heard of again. */
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
	u64 told_ns;
	u64 now_ns;
	enum told_by told_by;
	s32 error;
};

/* When it was told that the request that is done now is: not before it was issued. */
static __always_inline void tell(struct end *end, const struct block_request *request)
{
	struct at_interrupt *at = own_interrupt();
	u64 told_ns = 0;

	end->told_ns = end->now_ns;
	end->told_by = TOLD_BY_NOBODY;
	if (!at)
		return;
	told_ns = at->since_ns ? at->since_ns : is_in_softirq(at) ? at->told_ns : 0;
	if (told_ns > request->issued_ns && told_ns < end->now_ns) {
		end->told_ns = told_ns;
		end->told_by = at->since_ns ? TOLD_BY_INTERRUPT : TOLD_BY_SOFTIRQ;
	}
}

static __always_inline void fill(struct done_request *done, const struct block_request *request, const struct end *end)
{
	done->request = *request;
	done->told_ns = end->told_ns;
	done->completed_ns = end->now_ns;
	done->error = end->error;
	done->cpu = bpf_get_smp_processor_id();
	done->told_by = end->told_by;
	done->unused = 0;
}

static __always_inline void keep(const struct block_request *request, const struct end *end)
{
	u32 cpu = bpf_get_smp_processor_id(), index;
	u64 *count = bpf_map_lookup_elem(&count_by_cpu, &cpu), position;
	struct done_request *done;

	/* There is room for each CPU. */
	if (!count)
		return;
	position = __sync_fetch_and_add(count, 1);
	index = cpu * done_by_cpu + (position & (done_by_cpu - 1));
	done = bpf_map_lookup_elem(&done_by_position, &index);
	if (!done)
		return;
	store_word_in_order(&done->position, ~position);
	fill(done, request, end);
	store_word_in_order(&done->position, position);
}

static __always_inline void report(const struct block_request *request, const struct end *end)
{
	struct done_request *late = bpf_ringbuf_reserve(&late_requests, sizeof(*late), 0);

	if (!late) {
		lose(LOST_LATE_EVENTS);
		return;
	}
	late->position = 0;
	fill(late, request, end);
	bpf_ringbuf_submit(late, 0);
}

/* It is done. One of whoever measures counts for others only, which it made wait, as the block layer's own does. */
static __always_inline void request_ends(struct request_set *set, u32 slot, struct block_request *begun, s32 error)
{
	struct end end = { .now_ns = bpf_ktime_get_ns(), .error = error };

	/* One that only flushes has no turn at the device itself: the block layer's own flush has. */
	if (!begun->issued_ns) {
		begun->facts.flags |= FLAG_NOT_ISSUED;
		begun->issued_ns = begun->made_ns;
	}
	tell(&end, begun);
	if (keep_done)
		keep(begun, &end);
	if (own_process && begun->facts.pid == own_process) {
		lose(LOST_OWN);
	} else if (!begun->is_of_block_layer) {
		count_done(begun, end.told_ns, end.now_ns, error);
		if (late_over_ns && since(end.now_ns, begun->submitted_ns) >= late_over_ns)
			report(begun, &end);
	}
	forget(set, slot);
}

/* A driver that ends a request with the last of its parts (multipath) ends it once more when nothing is left of it. */
static __always_inline bool is_empty(const struct request *request, u32 bytes)
{
	return !bytes && !request->bio && !is_command(request) && !has_flush(request->cmd_flags);
}

/* It comes for each part that is done, and before those who wait are woken. Its error is a blk_status_t. */
SEC("tp_btf/block_rq_complete")
int BPF_PROG(on_block_rq_complete, struct request *request, int error, unsigned int bytes)
{
	struct block_request *begun;
	struct request_set *set;
	u32 slot;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	slot = slot_of_request(request, &set);
	begun = slot == NO_SLOT ? NULL : request_in(slot);
	if (!is_last_part(request, begun ? begun->has_flush : has_flush(request->cmd_flags), bytes))
		return 0;
	if (begun)
		request_ends(set, slot, begun, (u8)error);
	else if (!is_of_block_layer(request) && !is_empty(request, bytes))
		lose(LOST_UNMATCHED);
	return 0;
}

/*
 * Of devices without requests. Those of requests pass here, too, and some of the others: a driver may have made it one of
 * the device below (multipath). A part that a driver has cut off (md) ends, too, before the bio that it points to.
 */
SEC("?tp_btf/block_bio_complete")
int BPF_PROG(on_block_bio_complete, struct request_queue *queue, struct bio *bio)
{
	struct block_request *begun;
	struct request_set *set;
	u32 slot;

	if (!enabled)
		return 0;
	slot = slot_of((u64)bio, &set);
	begun = slot == NO_SLOT ? NULL : request_in(slot);
	/* Before 6.5, one with a flush goes by its bio, and its request comes to its end, too. */
	if (begun && !(begins_by_bio && queue->mq_ops))
		request_ends(set, slot, begun, bio->bi_status);
	else if (!begun && !queue->mq_ops && is_wanted(queue->disk) && slot_of((u64)bio->bi_private, &set) == NO_SLOT)
		lose(LOST_UNMATCHED);
	return 0;
}
