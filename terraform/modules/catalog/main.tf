# Every property of every shape, one row each. Nothing else in the repository knows one.
locals {
  # What can move memory over a fabric, as "library:protocol". EFA has no reliable-connected verbs: Mooncake's "rdma" and
  # UCX do not work there, whatever the NIC's name suggests.
  fabrics = {
    roce       = { rdma = true, transports = ["mooncake:rdma", "nixl:UCX"] }
    infiniband = { rdma = true, transports = ["mooncake:rdma", "nixl:UCX"] }
    efa        = { rdma = true, transports = ["mooncake:efa", "nixl:LIBFABRIC"] }
    ethernet   = { rdma = false, transports = ["mooncake:tcp", "nixl:UCX"] }
  }

  b200 = { gpu = "B200", gpus = 8, compute_capability = "10.0", gpu_memory_gb = 180 }
  h200 = { gpu = "H200", gpus = 8, compute_capability = "9.0", gpu_memory_gb = 141 }
  h100 = { gpu = "H100", gpus = 8, compute_capability = "9.0", gpu_memory_gb = 80 }
  cpu  = { gpu = null, gpus = 0, compute_capability = null, gpu_memory_gb = 0 }

  gpu_image   = "Ubuntu 24.04 with the NVIDIA open kernel modules (R570 or newer) and the fabric manager of the very same version"
  efa_image   = "${local.gpu_image}, EFA installer 1.38 or newer"
  rdma_image  = "${local.gpu_image}, rdma-core, nvidia-peermem or dma-buf"
  plain_image = "Ubuntu 24.04 or Debian 12"

  # nics: ordinary, RDMA. rails: RDMA NICs that reach the same NIC of other hosts. zones: where the shape is known to be
  # offered, regions or zones; empty: anywhere. local_disk_gb: NVMe inside the host.
  rows = {
    "p6-b200.48xlarge" = merge(local.b200, { provider = "aws", fabric = "efa", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = ["us-east-1", "us-east-2", "us-west-2"], image = local.efa_image, source = "EC2 instance types, accelerated computing" })
    "p5en.48xlarge"    = merge(local.h200, { provider = "aws", fabric = "efa", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 16, rails = 16, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.efa_image, source = "EC2 instance types, accelerated computing" })
    "p5.48xlarge"      = merge(local.h100, { provider = "aws", fabric = "efa", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 32, rails = 32, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.efa_image, source = "EC2 instance types, accelerated computing" })
    "c7i.4xlarge"      = merge(local.cpu, { provider = "aws", fabric = "ethernet", vcpus = 16, memory_gb = 32, ordinary_nics = 1, rdma_nics = 0, rails = 0, fabric_gbps = 12.5, local_disk_gb = 0, zones = [], image = local.plain_image, source = "EC2 instance types, compute optimized" })

    "a4-highgpu-8g"  = merge(local.b200, { provider = "gcp", fabric = "roce", vcpus = 224, memory_gb = 3968, ordinary_nics = 2, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 12000, zones = ["asia-southeast1-b", "europe-west4-b", "us-central1-b", "us-east1-b", "us-east4-b"], image = local.rdma_image, source = "Compute Engine, accelerator-optimized machine family" })
    "a3-ultragpu-8g" = merge(local.h200, { provider = "gcp", fabric = "roce", vcpus = 224, memory_gb = 2952, ordinary_nics = 2, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 12000, zones = [], image = local.rdma_image, source = "Compute Engine, accelerator-optimized machine family" })
    "c4-standard-16" = merge(local.cpu, { provider = "gcp", fabric = "ethernet", vcpus = 16, memory_gb = 60, ordinary_nics = 1, rdma_nics = 0, rails = 0, fabric_gbps = 23, local_disk_gb = 0, zones = [], image = local.plain_image, source = "Compute Engine, general-purpose machine family" })

    "BM.GPU.B200.8"       = merge(local.b200, { provider = "oci", fabric = "roce", vcpus = 256, memory_gb = 4096, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image, source = "OCI Compute shapes, GPU" })
    "BM.GPU.H200.8"       = merge(local.h200, { provider = "oci", fabric = "roce", vcpus = 224, memory_gb = 3072, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image, source = "OCI Compute shapes, GPU" })
    "BM.GPU.H100.8"       = merge(local.h100, { provider = "oci", fabric = "roce", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 16, rails = 16, fabric_gbps = 3200, local_disk_gb = 61440, zones = [], image = local.rdma_image, source = "OCI Compute shapes, GPU" })
    "VM.Standard.E5.Flex" = merge(local.cpu, { provider = "oci", fabric = "ethernet", vcpus = 16, memory_gb = 64, ordinary_nics = 1, rdma_nics = 0, rails = 0, fabric_gbps = 8, local_disk_gb = 0, zones = [], image = local.plain_image, source = "OCI Compute shapes, flexible: the size is chosen, this is ours" })

    "hgx-b200-infiniband" = merge(local.b200, { provider = "onprem", fabric = "infiniband", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image, source = "NVIDIA HGX B200 reference platform" })
    "hgx-b200-roce"       = merge(local.b200, { provider = "onprem", fabric = "roce", vcpus = 224, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image, source = "NVIDIA HGX B200 reference platform" })
    "hgx-h200-infiniband" = merge(local.h200, { provider = "onprem", fabric = "infiniband", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image, source = "NVIDIA HGX H200 reference platform" })
    "hgx-h200-roce"       = merge(local.h200, { provider = "onprem", fabric = "roce", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image, source = "NVIDIA HGX H200 reference platform" })
    "hgx-h100-infiniband" = merge(local.h100, { provider = "onprem", fabric = "infiniband", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image, source = "NVIDIA HGX H100 reference platform" })
    "hgx-h100-roce"       = merge(local.h100, { provider = "onprem", fabric = "roce", vcpus = 192, memory_gb = 2048, ordinary_nics = 1, rdma_nics = 8, rails = 8, fabric_gbps = 3200, local_disk_gb = 30720, zones = [], image = local.rdma_image, source = "NVIDIA HGX H100 reference platform" })
    "cpu-server"          = merge(local.cpu, { provider = "onprem", fabric = "ethernet", vcpus = 16, memory_gb = 32, ordinary_nics = 1, rdma_nics = 0, rails = 0, fabric_gbps = 10, local_disk_gb = 0, zones = [], image = local.plain_image, source = "the smallest router host this project sizes for" })
  }
}
