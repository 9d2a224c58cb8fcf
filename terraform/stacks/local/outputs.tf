output "nodes" {
  description = "Every host by its name: role, addresses, RDMA devices, GPUs, shape."
  value       = local.nodes
  depends_on  = [terraform_data.host]
}

output "inventory" {
  description = "What Ansible reads: groups, hosts and each host's variables."
  value       = module.inventory.inventory
  depends_on  = [terraform_data.host]
}

output "ingress_url" {
  description = "Where the cluster answers on this machine."
  value       = "http://${var.ingress_host}:${var.ingress_port}"
}
