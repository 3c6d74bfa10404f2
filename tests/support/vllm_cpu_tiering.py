"""vLLM's tiering with its accelerator's copies made on the CPU, because vLLM's own worker copies from and to
CUDA devices and XPUs only.

Everything else is vLLM's own: the connector, the scheduler's half, the tiering manager, the primary tier and
its memory. An engine takes it by `"spec_name": "CpuTieringSpec", "spec_module_path":
"tests.support.vllm_cpu_tiering"`.
"""

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuCopies(OffloadingWorker):
    """Copies blocks between an engine's KV tensors and the primary tier, at once."""

    def __init__(self, kv_caches, blocks_per_chunk, region):
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._engine = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors
        ]
        self._primary = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk)
            for one in kv_caches.tensors
        ]
        self._ended = []

    def _places(self, engine, primary):
        """The group, the engine's block, and the chunk and the place in it, of each block that moves."""
        blocks, chunks = iter(engine.block_ids.tolist()), iter(primary.block_ids.tolist())
        for group, (size, first) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            chunk = -1
            for index in range(first, first + size):
                if index == first or not index % self._blocks_per_chunk:
                    chunk = next(chunks)
                yield group, next(blocks), chunk, index % self._blocks_per_chunk
        assert next(chunks, None) is None

    def _copy(self, number, engine, primary, *, store):
        moved = 0
        for group, block, chunk, place in self._places(engine, primary):
            for ref in self._groups[group]:
                page = ref.page_size_bytes
                size = self._engine[ref.tensor_idx].shape[1]
                inside = self._engine[ref.tensor_idx][block, :page]
                outside = self._primary[ref.tensor_idx][chunk, place * size : place * size + page]
                (outside if store else inside).copy_(inside if store else outside)
                moved += page
        self._ended.append(TransferResult(number, True, moved, 0.0))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self):
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids):
        return

    def shutdown(self):
        self._engine.clear()
        self._primary.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering with these copies."""

    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopies(kv_caches, self.blocks_per_chunk, region)
        return self._worker
