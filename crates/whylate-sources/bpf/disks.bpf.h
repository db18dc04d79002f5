/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Helpers for all programs at block I/O requests. */
#pragma once

enum {
	/* include/linux/blk_types.h */
	REQ_OP_MASK = (1 << 8) - 1,
	REQ_OP_READ = 0,
	REQ_OP_WRITE = 1,
	REQ_OP_FLUSH = 2,
	REQ_OP_DISCARD = 3,
	REQ_OP_SECURE_ERASE = 5,
	/* include/linux/kdev_t.h */
	DEVICE_MINOR_BITS = 20,
};

static __always_inline u32 number_of_disk(const struct gendisk *disk)
{
	return (u32)disk->major << DEVICE_MINOR_BITS | (u32)disk->first_minor;
}

/* 0 without a disk. */
static __always_inline u32 device_of(const struct request *request)
{
	const struct gendisk *disk = request->q->disk;

	return disk ? number_of_disk(disk) : 0;
}

/* It flushes the device's cache before or after its writes; the block layer may do that in separate requests. */
static __always_inline bool has_flush(u32 flags)
{
	u32 flushes = 1u << bpf_core_enum_value(enum req_flag_bits, __REQ_FUA) | 1u << bpf_core_enum_value(enum req_flag_bits, __REQ_PREFLUSH);

	return (flags & REQ_OP_MASK) != REQ_OP_FLUSH && flags & flushes;
}

/* Whether the last part completes: the earlier parts of a request that started with a flush complete with an end_io function. */
static __always_inline bool is_last_part(const struct request *request, bool began_with_flush, u32 bytes)
{
	return bytes >= request->__data_len && !(began_with_flush && request->end_io);
}
