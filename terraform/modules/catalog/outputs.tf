output "shapes" {
  description = "Shape -> its properties: provider, gpu, gpus, compute_capability, gpu_memory_gb, fabric, transports, vcpus, memory_gb, ordinary_nics, rdma_nics, rails, fabric_gbps, local_disk_gb, zones, image, source, checked."
  value       = { for shape, row in local.rows : shape => merge(row, { transports = local.fabrics[row.fabric].transports, rdma = local.fabrics[row.fabric].rdma }) }
}

output "prices" {
  description = "Shape -> its public list price: usd_per_hour, as_of (the day it was read), source. A shape without one is not there."
  value       = local.prices
}
